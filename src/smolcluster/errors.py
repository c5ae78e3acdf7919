"""Every error that smolcluster raises on purpose, and the exit code that a process ends with.

    SmolclusterError            1
    ├── ConfigError             2   a configuration file, key, value or flag is wrong
    ├── UserCodeError           3   the user's model, loss, metric, data or hook raised an exception
    │   └── ModelChanged            … or the model changes weights that only the optimizer may change
    ├── DataError               1   a dataset is missing, damaged or does not fit the model
    ├── NonFiniteLoss           1   a loss, gradient or weight became NaN or infinite
    ├── ProtocolError           1   a peer sent bytes that the protocol does not allow
    │   └── VersionDiffers          … in another version of it
    ├── CheckpointError         1   a checkpoint is damaged, of another run, or cannot be written
    ├── LaunchError             1   a process of a run could not be started, or ended badly
    ├── RunFailed               1   the server ended the run because of an error elsewhere
    ├── OutOfMemory             1   a device has too little memory even for one sample at a time
    ├── DeviceFailed            71  the device's driver reported an error: only a new process can go on
    ├── RankLost                72  a rank of this worker's mesh has ended or hangs: a new process can go on
    ├── TryAgain                75  nothing is wrong with the configuration: try again
    │   ├── ConnectTimeout          no server answered in time
    │   ├── PeerLost                an established connection broke or fell silent
    │   │   └── NothingSaid         … closed by the peer before its first byte
    │   ├── WrongPeer               another node answered at the address of the one that was dialled
    │   ├── PortBusy                another process listens there
    │   ├── RunBusy                 another process writes the run's folder
    │   └── ClusterEmpty            no worker came, or all have gone
    ├── AuthError               77  the cluster's secret is missing, unreadable or wrong
    │   └── WrongCode               the invitation has another code, and takes another try
    └── Rejected                78  the server refused this worker, or rank 0 this rank, and says why

Usage errors exit with 2, a bug with 70, an interrupt with 130, a termination with 143. Every message names
the thing, its value and the next move, and fits on one line.
"""

DEVICE_FAILED = 71
RANK_LOST = 72


class SmolclusterError(Exception):
    """Base of all errors that a process reports as one line."""

    exit_code = 1


class ConfigError(SmolclusterError):
    """A configuration file, key, value or command-line flag is wrong."""

    exit_code = 2


class UserCodeError(SmolclusterError):
    """The user's model, loss, metric, data or hook raised an exception, or returned what it must not.

    `frames`: the traceback without frames of smolcluster and of installed packages; empty: there is none.
    """

    exit_code = 3

    def __init__(self, sentence: str, frames: str = "") -> None:
        super().__init__(sentence)
        self.frames = frames


class ModelChanged(UserCodeError):
    """Computing has changed parameters or gradients, which only the optimizer and the backward may."""


class DataError(SmolclusterError):
    """A dataset is missing or damaged, or does not fit the model."""


class NonFiniteLoss(SmolclusterError):
    """A loss, gradient or weight became NaN or infinite: training stops and nothing of it is sent."""


class ProtocolError(SmolclusterError):
    """A peer sent bytes that the protocol does not allow: the connection must be closed."""


class VersionDiffers(ProtocolError):
    """The peer speaks another version of the protocol: trying again is of no use."""


class CheckpointError(SmolclusterError):
    """A checkpoint is damaged, belongs to another run or model, or cannot be written."""


class LaunchError(SmolclusterError):
    """A process of a run could not be started, or ended badly."""


class RunFailed(SmolclusterError):
    """The server ended the run because of an error elsewhere in the cluster."""


class OutOfMemory(SmolclusterError):
    """A device has too little memory even for one sample at a time."""


class DeviceFailed(SmolclusterError):
    """The device's driver reported an error, after which nothing in this process can use the device."""

    exit_code = DEVICE_FAILED


class RankLost(SmolclusterError):
    """A rank of the mesh that is this worker has ended, or does not go on; without it nothing can be done."""

    exit_code = RANK_LOST


class TryAgain(SmolclusterError):
    """A passing condition: the same command may succeed later."""

    exit_code = 75


class ConnectTimeout(TryAgain):
    """No server answered before the deadline."""


class PeerLost(TryAgain):
    """A connection broke or fell silent: what was in flight may or may not have arrived."""


class NothingSaid(PeerLost):
    """The peer closed the connection before its first byte, as who only looks whether a port is open."""


class WrongPeer(TryAgain):
    """Another node of the cluster answered at the address of the one that was dialled."""


class PortBusy(TryAgain):
    """Another process already listens on the address."""


class RunBusy(TryAgain):
    """Another process writes the run's folder."""


class ClusterEmpty(TryAgain):
    """Not enough workers came in time, or all of them have gone."""


class AuthError(SmolclusterError):
    """The cluster's secret is missing, readable by others, or not the peer's."""

    exit_code = 77


class WrongCode(AuthError):
    """The code that was typed is not that of the invitation, which takes another try."""


class Rejected(SmolclusterError):
    """The server refused this worker, or a rank has other data than rank 0.

    The message says what differs and where to mend it.

    `code` is the protocol's word for the reason; `retry_after_s` is None when asking again is of no use.
    Unless `is_proved`, somebody between the two may have said it.
    """

    exit_code = 78

    def __init__(
        self,
        sentence: str,
        code: str = "",
        retry_after_s: float | None = None,
        *,
        is_proved: bool = True,
    ) -> None:
        super().__init__(sentence)
        self.is_proved = is_proved
        self.code = code
        self.retry_after_s = retry_after_s

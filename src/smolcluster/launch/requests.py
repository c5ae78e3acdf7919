"""What a request of a user means: the settings of each process."""

from smolcluster.configs.resolve import Settings, load_settings
from smolcluster.launch.plan import Request


def settings_of(request: Request, local: bool, node: str | None = None) -> Settings:
    """What a process on `node` (None: the server's) is told by this request.

    Raises:
        ConfigError: one line with what is wrong.
    """
    return load_settings(
        request.config or request.algorithm.name,
        request.train_config or ("digits" if local else "nn"),
        node,
        request.overrides,
        local_workers=request.num_workers,
        local=local,
    )

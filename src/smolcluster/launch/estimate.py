"""What a run will cost, from its configuration alone: parameters, memory, and bytes a step on each link.

Nothing is measured. A parameter has four bytes; activations, PyTorch itself (some 0.5 GB) and the batch come
on top.
"""

from dataclasses import dataclass

from smolcluster.algorithms.planning.costs import FLOAT_NBYTES, Job, costs_of, num_moments
from smolcluster.configs.schema import GPTConfig, Settings, SimpleNNConfig
from smolcluster.configs.spec import get_algorithm

VOCABULARIES = {"bytes": 256, "openai-community/gpt2": 50257, "gpt2": 50257}
FEATURES = {"digits": 64, "MNIST": 784}
LAYER_TENSORS = 2
"""Of a linear layer or a norm: weight and bias."""
BLOCK_LAYERS = 6
"""Of a GPT's block: two norms, two linear layers of attention, two behind it."""
LINKS_MB_S = (12.5, 125, 1250)
"""Fast Ethernet or good Wi-Fi, Gigabit Ethernet, Thunderbolt; megabytes a second."""


@dataclass(frozen=True)
class StepCost:
    """What a run costs. Bytes are of one step of one worker, to the server and from it."""

    num_params: int
    server_nbytes: int
    worker_nbytes: int
    sent_nbytes: int
    received_nbytes: int

    def transfer_s(self, mb_s: float) -> float:
        """Seconds that the bytes of a step take on a link of so many MB a second, both ways at once."""
        return max(self.sent_nbytes, self.received_nbytes) / (1e6 * mb_s)


def cost_of(settings: Settings, algorithm: str) -> StepCost | None:
    """What a run of these settings costs; None where only its data tell how large the model is.

    None also of an algorithm that predicts nothing.
    """
    num_params, costs = params_of(settings), costs_of(get_algorithm(algorithm))
    if num_params is None or costs is None:
        return None
    cluster = settings.cluster
    copy = num_params * FLOAT_NBYTES
    sent, received = costs.step_nbytes(Job(num_params), settings)
    own = (2 + num_moments(settings.train)) * copy
    return StepCost(
        num_params=num_params,
        server_nbytes=own + (cluster.num_workers + 1) * copy,
        worker_nbytes=own + 2 * copy,
        sent_nbytes=sent,
        received_nbytes=received,
    )


def params_of(settings: Settings) -> int | None:
    """Trainable weights; None where the data, an unknown tokenizer or a workload decide."""
    if settings.train.workload is not None:
        return None
    model, dataset = settings.train.model, settings.train.dataset
    if isinstance(model, SimpleNNConfig):
        features = model.input_dim or FEATURES.get(dataset.name)
        if features is None:
            return None
        return (features + 1) * model.hidden + (model.hidden + 1) * model.out
    vocabulary = VOCABULARIES.get(dataset.tokenizer)
    return None if vocabulary is None else gpt_params(model, vocabulary)


def tensors_of(settings: Settings) -> int | None:
    """Trainable tensors; None where a workload decides."""
    if settings.train.workload is not None:
        return None
    model = settings.train.model
    if isinstance(model, SimpleNNConfig):
        return 2 * LAYER_TENSORS
    embeddings, final_norm = 2, LAYER_TENSORS
    return embeddings + model.num_layers * BLOCK_LAYERS * LAYER_TENSORS + final_norm


def gpt_params(model: GPTConfig, vocabulary: int) -> int:
    width, hidden = model.model_dim, model.ff_dim
    attention = 4 * width * width + 4 * width
    feed_forward = 2 * width * hidden + hidden + width
    norms = 4 * width
    block = attention + feed_forward + norms
    return (vocabulary + model.max_seq_len) * width + model.num_layers * block + 2 * width

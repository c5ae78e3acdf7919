"""The models that a configuration can name."""

from torch import nn

from smolcluster.configs.schema import GPTConfig, ModelConfig, SimpleNNConfig
from smolcluster.models.gpt import build_gpt
from smolcluster.models.SimpleNN import SimpleNN


def build_model(config: ModelConfig, input_dim: int, num_classes: int) -> nn.Module:
    """Build the model that `config` describes, on the CPU, with fresh initial weights.

    Args:
        config: the model's type and sizes.
        input_dim: features a sample; of text, tokens a sample.
        num_classes: logits a sample; of text, the size of the vocabulary.

    Raises:
        CheckpointError, ConfigError: `model.pretrained` cannot be read, or is of another size.
    """
    match config:
        case SimpleNNConfig():
            return SimpleNN(input_dim, config.hidden, num_classes, config.activation)
        case GPTConfig():
            return build_gpt(config, num_classes)

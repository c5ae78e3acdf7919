"""transformers.Trainer in a cluster: unchanged but for the callback.

smolcluster serve cluster.yaml
SMOLCLUSTER_NAME=pi5 python trainer.py cluster.yaml     # on each machine, with its name in cluster.yaml
"""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from smolcluster.api.callbacks import trainer_callback


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards, modulo 16."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (index + torch.arange(12)) % 16
        return {"input_ids": ids, "labels": ids}


def main(cluster_file: str, folder: str) -> list[float]:
    """Train; returns the losses that the Trainer logs."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        num_train_epochs=4,
        learning_rate=1e-2,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Counting())
    trainer.add_callback(trainer_callback(cluster_file))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        losses = main(sys.argv[1] if len(sys.argv) > 1 else "cluster.yaml", folder)
    sys.stdout.write(f"losses: {', '.join(f'{loss:.3f}' for loss in losses)}\n")

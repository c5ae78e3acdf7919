"""Fine-tunes Llama 3.1 8B with LoRA on instructions (Alpaca), its layers spread over unequal machines.

    smolcluster init --hetero                   # once: writes hetero_config.json; copy it to all machines
    python examples/demo_llama8b4bit_distributed.py --config hetero_config.json      # on every machine

Each machine finds by its addresses which part is its own. `--resume_step N` goes on from a checkpoint,
`--checkpoint_dir DIR` keeps runs elsewhere; both are for the coordinator alone. On CUDA with bitsandbytes
the frozen weights have 4 bits, elsewhere 16. It needs peft: `uv pip install peft`.
"""

from pathlib import Path

from smolcluster.launch.hetero.start import main

OUTPUT_DIR = "./lora_unsloth_sft_distributed"
TRAINING = {
    "batch_size": 4,
    "learning_rate": 2e-4,
    "weight_decay": 0.0,
    "num_epochs": 1,
    "checkpoint_steps": 20,
    "gradient_clipping": {"enabled": True, "max_norm": 1.0},
}

if __name__ == "__main__":  # the processes that it starts load PyTorch, it does not
    raise SystemExit(main(Path(__file__), output_dir=OUTPUT_DIR, training=TRAINING))

import json

import torch
from datasets import load_dataset
from huggingface_hub import snapshot_download
from torch import Tensor
from torch.utils.data import Dataset

from smolcluster import Workload
from smolcluster.data.tokenizer import Tokenizer, load_tokenizer
from smolcluster.training.finetune import lora_config, next_token_loss
from smolcluster.training.pretrained import Pretrained

SYSTEM = "You are a helpful assistant."
MASKED = -100
"""A target that is no loss term."""


class Instructions(Dataset[tuple[Tensor, Tensor]]):
    """Rows of instruction, input and output as tokens and the tokens after them, all of one length."""

    def __init__(self, rows: list[dict[str, str]], tokenizer: Tokenizer, length: int) -> None:
        self._rows, self._tokenizer, self._length = rows, tokenizer, length

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self._rows[index]
        said = "\n\nInput:\n".join(filter(None, (row["instruction"], row.get("input", ""))))
        text = f"{SYSTEM}\n<|user|>\n{said}\n<|assistant|>\n{row['output']}\n"
        [found] = self._tokenizer.encode_batch([text])
        ids = [*found.tolist(), self._tokenizer.end_of_text][: self._length + 1]
        inputs = torch.zeros(self._length, dtype=torch.long)
        targets = torch.full((self._length,), MASKED)
        inputs[: len(ids) - 1] = torch.tensor(ids[:-1])  # what follows them changes nothing before
        targets[: len(ids) - 1] = torch.tensor(ids[1:])
        return inputs, targets


def rows_of(data: str, num_rows: int) -> list[dict[str, str]]:
    """Of a file with a JSON object a line, or of a dataset of the hub."""
    path = Path(data).expanduser()
    if path.is_file():
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][
            :num_rows
        ]
    return list(load_dataset(data, split=f"train[:{num_rows}]"))


def workload(
    *,
    base_model: str = "unsloth/Meta-Llama-3.1-8B",
    data: str = "tatsu-lab/alpaca",
    num_rows: int = 100,
    max_length: int = 512,
    lora_rank: int = 16,
    lora_dropout: float = 0.05,
    four_bit: bool = True,
) -> Workload:
    """`base_model`: a folder, or a name on the hub, of which a copy is kept on this machine."""
    folder = Path(base_model).expanduser().absolute()
    if not folder.is_dir():
        folder = Path(snapshot_download(base_model))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = lora_config(lora_rank, 2.0 * lora_rank, targets, lora_dropout)
    samples = Instructions(rows_of(data, num_rows), load_tokenizer(str(folder)), max_length)
    model = Pretrained(folder, lora=lora, four_bit=four_bit)
    return Workload(model, next_token_loss, samples)

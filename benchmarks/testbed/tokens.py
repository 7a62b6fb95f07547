"""Trains the tokenizer of the mini-MoE and encodes the documents of `corpus.py`.

    python tokens.py --work build/testbed

Writes `tokenizer/` and `tokens.npz` (about 0.9 bytes per token) into the working folder. Training needs only these
files, so it can run on a host without network or Debian packages.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
CONTEXT_LENGTH = 1024
END_OF_DOCUMENT = "<|endoftext|>"
END_OF_DOCUMENT_ID = 0
ENCODE_BATCH = 256


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Train byte-level BPE, which needs no unknown token; id 0 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.token_to_id(END_OF_DOCUMENT) == END_OF_DOCUMENT_ID
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that `AutoTokenizer.from_pretrained` reads."""
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_DOCUMENT,
        pad_token=END_OF_DOCUMENT,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    # transformers 4 and 5 write different names of the generic class; both accept this one
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Encode all texts in order into one uint16 array, each followed by the end-of-document id."""
    pieces = []
    for start in range(0, len(texts), ENCODE_BATCH):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + ENCODE_BATCH]):
            pieces.append(np.array([*encoding.ids, END_OF_DOCUMENT_ID], dtype=np.uint16))
    return np.concatenate(pieces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="working folder with documents.jsonl")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of training documents")
    arguments = parser.parse_args()

    train: list[str] = []
    held_out: dict[str, list[str]] = defaultdict(list)
    with open(arguments.work / "documents.jsonl", encoding="utf-8") as file:
        for document in map(json.loads, file):
            (held_out[document["kind"]] if document["held_out"] else train).append(document["text"])
    random.Random(arguments.seed).shuffle(train)

    tokenizer = train_tokenizer(iter(train))
    save_tokenizer(tokenizer, arguments.work / "tokenizer")
    arrays = {f"held_out.{kind}": encode(tokenizer, texts) for kind, texts in sorted(held_out.items())}
    arrays["train"] = encode(tokenizer, train)
    np.savez_compressed(arguments.work / "tokens.npz", **arrays)
    for name, tokens in arrays.items():
        print(f"{name}: {len(tokens):,} tokens")


if __name__ == "__main__":
    main()

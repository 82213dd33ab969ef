"""Trains the tiny model's tokenizer: a byte-level BPE in the shape of Qwen's, on the corpus.

The split into words is Qwen's: digits one by one, runs of newlines apart from letters. Behind the words come Qwen3's
chat tokens, then the rest of its special tokens, of which the corpus has none. Those of tool calls and thinking are
single tokens but not special, so decoding keeps them when it skips special tokens.
"""

import itertools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from tools.tiny_model.corpus import END_OF_TEXT, documents

VOCAB_SIZE = 1560
CONTEXT_LENGTH = 2048
TRAINING_DOCUMENTS = 12_000
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")
THINK_TOKENS = ("<think>", "</think>")
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FILE_TOKENS = tuple(
    f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")
)
MEDIA_TOKENS = tuple(
    f"<|{name}|>"
    for name in (
        *("object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start", "quad_end", "vision_start"),
        *("vision_end", "vision_pad", "image_pad", "video_pad", "audio_start", "audio_end", "audio_pad"),
    )
)
#: The special tokens, in the order of their ids.
ADDED_TOKENS = (*SPECIAL_TOKENS, *THINK_TOKENS, *TOOL_TOKENS, *FILE_TOKENS, *MEDIA_TOKENS)
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: The chat template beside this file: in the form of Qwen3's, with tools, thinking and tool responses.
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text()


def train_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer of `VOCAB_SIZE` tokens, the same for the same seed."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ADDED_TOKENS),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(map(_without_markers, itertools.islice(documents(seed), TRAINING_DOCUMENTS)), trainer)
    special = {*SPECIAL_TOKENS, *MEDIA_TOKENS}
    tokenizer.add_tokens([AddedToken(t, special=t in special, normalized=False) for t in ADDED_TOKENS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, wanted {VOCAB_SIZE}")
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, the chat template inside, as `AutoTokenizer` reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "bos_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _without_markers(document: str) -> str:
    for token in ADDED_TOKENS:
        document = document.replace(token, "\n\n")
    return document

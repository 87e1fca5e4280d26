"""The tokenizer in a GGUF file's metadata, as the ``tokenizer.json`` it was converted from.

Two kinds are read. ``gpt2`` is byte-level BPE: vocabulary and merges are in the file, and
``tokenizer.ggml.pre`` names how text is split before them. ``llama`` is SentencePiece BPE: merges
are what vocabulary and scores imply, spaces are written as U+2581, and what the vocabulary lacks
falls back to bytes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from llmq.checkpoint.gguf_file import Metadata
from llmq.errors import CheckpointError, UnsupportedModelError

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"

#: Values of ``tokenizer.ggml.token_type``.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

#: Name in ``tokenizer_config.json`` -> metadata that holds its id.
_NAMED = MappingProxyType(
    {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
)
#: Metadata whose tokens are control tokens whatever their type says.
_CONTROL_IDS = (*_NAMED.values(), "eot_token_id", "eom_token_id")

#: What SentencePiece writes for a space.
_SPACE = "\u2581"

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_TIKTOKEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBERS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """How byte-level BPE prepares text.

    Attributes:
        pre_tokenizer: Cuts text into words.
        normalizer: Applied before.
        ignore_merges: A word that is a token is taken whole.
        adds_bos: Texts get a BOS unless the file says otherwise.
    """

    pre_tokenizer: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _at(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_SMOLLM = Splitting(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]))
_LLAMA3 = Splitting(_at(_TIKTOKEN_SPLIT.replace("NUMBERS", "{1,3}")), ignore_merges=True, adds_bos=True)
_QWEN2 = Splitting(_at(_TIKTOKEN_SPLIT.replace("NUMBERS", "")), normalizer=normalizers.NFC())

#: ``tokenizer.ggml.pre`` -> how text is prepared, as llama.cpp does.
_SPLITTINGS = MappingProxyType(
    {
        "gpt-2": Splitting(_GPT2),
        "default": Splitting(_at(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")),
        "smollm": _SMOLLM,
        "starcoder": _SMOLLM,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "llama-bpe": _LLAMA3,
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
    }
)


def tokenizer_files(metadata: Metadata) -> dict[str, bytes]:
    """The tokenizer's side files.

    Args:
        metadata: Of the GGUF file.

    Returns:
        ``tokenizer.json`` and ``tokenizer_config.json``; nothing for a file without a vocabulary.

    Raises:
        CheckpointError: The vocabulary is damaged.
        UnsupportedModelError: The tokenizer, or its way to split text, is not one llmq knows.
    """
    tokens = metadata.array(f"{_PREFIX}tokens", str)
    if not tokens:
        return {}
    if len(set(tokens)) < len(tokens):
        raise CheckpointError(f"{metadata.path}: {_PREFIX}tokens lists a token twice; the vocabulary is damaged.")
    adds = _added(metadata)
    original = metadata.get("tokenizer.huggingface.json", str)
    files = {
        "tokenizer.json": original or build_tokenizer(metadata).to_str(),
        "tokenizer_config.json": json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **{
                    name: tokens[i]
                    for name, key in _NAMED.items()
                    if (i := _token_id(metadata, key, tokens)) is not None
                },
                **adds,
                "clean_up_tokenization_spaces": False,
                **_chat_template(metadata),
            },
            ensure_ascii=False,
            indent=2,
        ),
    }
    return {name: text.encode() for name, text in files.items()}


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Args:
        metadata: Of the GGUF file; has ``tokenizer.ggml.tokens``.

    Returns:
        A tokenizer with its special tokens, adding BOS and EOS where the file says so.

    Raises:
        CheckpointError: Vocabulary, scores or merges do not fit each other.
        UnsupportedModelError: The tokenizer, or its way to split text, is not one llmq knows.
    """
    tokens = metadata.array(f"{_PREFIX}tokens", str) or []
    types = _types(metadata, tokens)
    model = metadata.require(f"{_PREFIX}model", str)
    if model not in _BUILDERS:
        raise UnsupportedModelError(f"{metadata.path}: {_PREFIX}model is {model!r}; llmq reads {', '.join(_BUILDERS)}.")
    try:
        tokenizer = _BUILDERS[model](metadata, tokens)
    except (CheckpointError, UnsupportedModelError):
        raise
    except Exception as err:  # the library raises nothing narrower
        raise CheckpointError(f"{metadata.path}: the vocabulary and its merges do not fit each other ({err}).") from err
    control = {_token_id(metadata, key, tokens) for key in _CONTROL_IDS}
    is_control = [kind in (_UNKNOWN, _CONTROL) or i in control for i, kind in enumerate(types)]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, special in zip(tokens, is_control, strict=True)
            if special
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, kind, special in zip(tokens, types, is_control, strict=True)
            if kind == _USER_DEFINED and not special
        ]
    )
    _add_post_processor(tokenizer, metadata, tokens)
    return tokenizer


def _byte_level(metadata: Metadata, tokens: Sequence[str]) -> Tokenizer:
    pre = metadata.require(f"{_PREFIX}pre", str)
    if pre not in _SPLITTINGS:
        raise UnsupportedModelError(
            f"{metadata.path}: {_PREFIX}pre is {pre!r}; llmq splits text like {', '.join(_SPLITTINGS)}."
        )
    merges = [merge.partition(" ") for merge in metadata.array(f"{_PREFIX}merges", str) or []]
    if any(not left or not right or " " in right for left, _, right in merges):
        raise CheckpointError(
            f"{metadata.path}: an entry of {_PREFIX}merges is not two pieces; the vocabulary is damaged."
        )
    splitting = _SPLITTINGS[pre]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(left, right) for left, _, right in merges],
            ignore_merges=splitting.ignore_merges,
        )
    )
    if splitting.normalizer:
        tokenizer.normalizer = splitting.normalizer
    tokenizer.pre_tokenizer = splitting.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Metadata, tokens: Sequence[str]) -> Tokenizer:
    """As the ``tokenizer.json`` of Llama 2: the prefix space is a normalizer, the decoder strips it."""
    scores = metadata.array(f"{_PREFIX}scores", float) or []
    if len(scores) != len(tokens):
        raise CheckpointError(f"{metadata.path}: {_PREFIX}scores has {len(scores)} entries for {len(tokens)} tokens.")
    unknown = _token_id(metadata, "unknown_token_id", tokens)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=implied_merges(tokens, scores, _types(metadata, tokens)),
            unk_token=tokens[0 if unknown is None else unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    decoder: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(f"{_PREFIX}add_space_prefix", bool) is False:
        tokenizer.normalizer = spaces
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        decoder.append(decoders.Strip(" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(decoder)
    return tokenizer


_BUILDERS = MappingProxyType({"gpt2": _byte_level, "llama": _sentencepiece})


def implied_merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE vocabulary: every way to make a piece from two, best score first.

    Args:
        tokens: Pieces by id.
        scores: Of each piece; the higher is merged first.
        types: ``tokenizer.ggml.token_type`` of each; only normal pieces take part.

    Returns:
        Pairs in order of rank.

    Source:
        transformers ``generate_merges``.
    """
    normal = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, i in normal.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((-scores[i], i, -len(left), left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _types(metadata: Metadata, tokens: Sequence[str]) -> Sequence[int]:
    types = metadata.array(f"{_PREFIX}token_type", int) or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{metadata.path}: {_PREFIX}token_type has {len(types)} entries for {len(tokens)} tokens."
        )
    return types


def _token_id(metadata: Metadata, key: str, tokens: Sequence[str]) -> int | None:
    index = metadata.get(_PREFIX + key, int)
    if index is not None and not 0 <= index < len(tokens):
        raise CheckpointError(
            f"{metadata.path}: {_PREFIX}{key} is {index}, outside the vocabulary of {len(tokens)} tokens."
        )
    return index


def _added(metadata: Metadata) -> dict[str, bool]:
    """Whether texts get a BOS and an EOS: what the file says, else what llama.cpp takes for granted."""
    bos = metadata.get(f"{_PREFIX}add_bos_token", bool)
    if bos is None:
        splitting = _SPLITTINGS.get(metadata.get(f"{_PREFIX}pre", str) or "")
        bos = metadata.get(f"{_PREFIX}model", str) == "llama" or bool(splitting and splitting.adds_bos)
    has_bos, has_eos = (metadata.get(f"{_PREFIX}{name}_token_id", int) is not None for name in ("bos", "eos"))
    eos = metadata.get(f"{_PREFIX}add_eos_token", bool) or False
    return {"add_bos_token": bos and has_bos, "add_eos_token": eos and has_eos}


def _add_post_processor(tokenizer: Tokenizer, metadata: Metadata, tokens: Sequence[str]) -> None:
    adds = _added(metadata)
    bos, eos = (
        _token_id(metadata, f"{name}_token_id", tokens) if adds[f"add_{name}_token"] else None
        for name in ("bos", "eos")
    )
    if bos is None and eos is None:
        return
    before, after = ([] if i is None else [tokens[i]] for i in (bos, eos))
    ids = {tokens[i]: i for i in (bos, eos) if i is not None}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)],
        special_tokens=list(ids.items()),
    )


def _chat_template(metadata: Metadata) -> Mapping[str, Any]:
    default = metadata.get(_TEMPLATE, str)
    named = {
        name: metadata.require(f"{_TEMPLATE}.{name}", str)
        for name in metadata.array("tokenizer.chat_templates", str) or []
    }
    if not named:
        return {} if default is None else {"chat_template": default}
    everything = named if default is None else {"default": default, **named}
    return {"chat_template": [{"name": name, "template": template} for name, template in everything.items()]}

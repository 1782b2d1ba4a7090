"""Text to token ids and back: GPT-2's BPE through tiktoken, and byte-level BPE that is trained here.

Lives here: the two tokenizers, the bytes behind each id (bits per byte needs them), one file format for both.
Not here: where the text comes from (local.py, tokenize.py) and how ids are stored (shards.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data.errors import DataError

END_OF_TEXT = "<|endoftext|>"
GPT2_VOCAB = 50257
GPT2_FINGERPRINT = "88a5208090d4deb768ffc64a71a2a4f9296ab8448f33d94b816aa7e1ec6105df"
# How GPT-2 splits text before merging (openai/gpt-2, encoder.py); possessive runs match the same, backtracking less.
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte (openai/gpt-2, encoder.py): itself if it shows, else from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
_CHAR_OF = {byte: char for char, byte in _BYTE_OF.items()}


class Tokenizer:
    """What every tokenizer here offers. Ids are 0 .. vocab_size - 1 and every text, whatever its characters, has ids.

    name: str; vocab_size: ids; bos: the id of <|endoftext|>, which starts every document. Text is never parsed for
    special tokens: the characters "<|endoftext|>" in a text become ordinary tokens, and no `bos` is added.
    """

    def __init__(self, name: str, byte_strings: list[bytes], special: Iterable[int], bos: int, split: str):
        self.name, self.bos, self.vocab_size = name, bos, len(byte_strings)
        self._bytes, self._special, self._split = byte_strings, frozenset(special), split

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, on as many threads as the library likes. A lone surrogate becomes U+FFFD."""
        raise NotImplementedError

    def _as_library(self) -> tokenizers.Tokenizer:
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """Ids of one text."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`: what is no UTF-8 becomes U+FFFD, a special id its name. DataError for an unknown id."""
        ids = [int(one) for one in ids]
        for one in ids:
            if not 0 <= one < self.vocab_size:
                raise DataError(f"token id {one} is outside the {self.vocab_size} ids of tokenizer {self.name}")
        return b"".join(self._bytes[one] for one in ids).decode("utf-8", errors="replace")

    def byte_strings(self) -> list[bytes]:
        """The bytes of each id [vocab_size]; of a special one, its name."""
        return list(self._bytes)

    def token_strings(self) -> list[bytes | None]:
        """The bytes of text each id stands for [vocab_size]; None for special ids, which stand for none."""
        return [None if one in self._special else text for one, text in enumerate(self._bytes)]

    def token_bytes(self) -> np.ndarray:
        """Bytes of text each id stands for, int32 [vocab_size]; 0 for special ids, which stand for none."""
        counts = np.array([len(one) for one in self._bytes], dtype=np.int32)
        counts[list(self._special)] = 0
        return counts

    def fingerprint(self) -> str:
        """SHA-256, hex, of what fixes the ids: the bytes of each id in order, the special ids, the splitting rule."""
        digest = hashlib.sha256()
        for one in (*self._bytes, *(str(special).encode() for special in sorted(self._special)), self._split.encode()):
            digest.update(len(one).to_bytes(4, "little") + one)
        return digest.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer.json that load_tokenizer and the `tokenizers` library read: whole, or an OSError."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
        try:
            with open(temporary, "x", encoding="utf-8") as handle:
                handle.write(self._as_library().to_str())
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


class GPT2Tokenizer(Tokenizer):
    """GPT-2's 50,257 ids through tiktoken; <|endoftext|> is 50256.

    encoding: a tiktoken encoding of these ids; by default the library's own, whose two files it fetches once and caches
    (DataError when they cannot be had). Without a network use `from_files`, or the tokenizer.json of an earlier run.
    """

    def __init__(self, encoding: tiktoken.Encoding | None = None):
        if encoding is None:
            try:
                encoding = tiktoken.get_encoding("gpt2")
            except Exception as error:  # tiktoken lets through whatever requests, the disk or its hash check raise
                raise DataError(
                    f"the files of the GPT-2 tokenizer cannot be had ({type(error).__name__}): connect to the network "
                    "once, or set TIKTOKEN_CACHE_DIR to a folder in which tiktoken has cached them"
                ) from error
        self.encoding = encoding
        byte_strings = [encoding.decode_single_token_bytes(one) for one in range(encoding.n_vocab)]
        super().__init__("gpt2", byte_strings, [GPT2_VOCAB - 1], GPT2_VOCAB - 1, "gpt2")

    @classmethod
    def from_files(cls, encoder_json: str | os.PathLike[str], vocab_bpe: str | os.PathLike[str]) -> GPT2Tokenizer:
        """From GPT-2's published vocabulary and merges. DataError when they are unreadable or not those of GPT-2."""
        try:
            ids = json.loads(Path(encoder_json).read_text(encoding="utf-8"))
            merges = [line.split(" ") for line in Path(vocab_bpe).read_text(encoding="utf-8").splitlines()[1:] if line]
            in_order = all(ids[left + right] == 256 + rank for rank, (left, right) in enumerate(merges))
            ranks = {bytes(_BYTE_OF[char] for char in text): one for text, one in ids.items() if text != END_OF_TEXT}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{encoder_json}, {vocab_bpe}: not GPT-2's vocabulary and merges: {error!r}") from error
        if not in_order or len(merges) != GPT2_VOCAB - 257 or sorted(ids.values()) != list(range(GPT2_VOCAB)):
            raise DataError(f"{encoder_json}, {vocab_bpe}: not GPT-2's vocabulary and merges, or not of one kind")
        return cls._from_ranks(ranks)

    @classmethod
    def _from_ranks(cls, ranks: dict[bytes, int]) -> GPT2Tokenizer:
        special = {END_OF_TEXT: GPT2_VOCAB - 1}
        return cls(tiktoken.Encoding("gpt2", pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens=special))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encoding.encode_ordinary_batch(list(texts), num_threads=os.cpu_count() or 1)

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def _as_library(self) -> tokenizers.Tokenizer:
        ranks = {one: rank for rank, one in enumerate(self._bytes[:-1])}
        vocab = {_printable(one): rank for one, rank in ranks.items()} | {END_OF_TEXT: self.bos}
        merges = [tuple(map(_printable, _halves(one, ranks))) for one in self._bytes[256:-1]]
        return _byte_level(models.BPE(vocab, merges))


class ByteBPE(Tokenizer):
    """Byte-level BPE of the `tokenizers` library: trained by `train_bpe`, or any tokenizer.json of that kind.

    where: named in the DataError for a vocabulary that is not byte-level, has gaps, or has no <|endoftext|>.
    """

    def __init__(self, library: tokenizers.Tokenizer, where: str = "this tokenizer"):
        library.encode_special_tokens = True  # or "<|endoftext|>" in a text would be parsed
        self.library = library
        vocab = library.get_vocab(with_added_tokens=True)
        literal = library.get_added_tokens_decoder()
        if sorted(vocab.values()) != list(range(len(vocab))):
            raise DataError(f"{where}: its ids are not 0 to {len(vocab) - 1} without gaps: it cannot be used here")
        if END_OF_TEXT not in vocab:
            raise DataError(f"{where} has no {END_OF_TEXT}, which starts documents: train it with that special token")
        special = {one for one, token in literal.items() if token.special} | {vocab[END_OF_TEXT]}
        byte_strings = [b""] * len(vocab)
        for text, one in vocab.items():
            try:
                named = one in literal or one in special
                byte_strings[one] = text.encode() if named else bytes(_BYTE_OF[char] for char in text)
            except KeyError:
                raise DataError(f"{where} is no byte-level BPE: token {text!r} is not made of its characters") from None
        if not vocab.keys() >= _BYTE_OF.keys():
            raise DataError(f"{where} lacks some of the 256 bytes and would lose text: train it with all of them")
        super().__init__(f"bpe-{len(vocab)}", byte_strings, special, vocab[END_OF_TEXT], _split_rule(library))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return [one.ids for one in self.library.encode_batch_fast(list(texts), add_special_tokens=False)]
        except (TypeError, UnicodeEncodeError):
            whole = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
            return [one.ids for one in self.library.encode_batch_fast(whole, add_special_tokens=False)]

    def _as_library(self) -> tokenizers.Tokenizer:
        return self.library


def train_bpe(texts: Iterator[str], vocab_size: int) -> ByteBPE:
    """A byte-level BPE of `vocab_size` ids (257 or more; fewer come out when the text has too few pairs to merge).

    <|endoftext|> is id 0, the 256 bytes follow, then the merges in order; text is split as GPT-2 splits it.
    The same texts give the same tokenizer, whatever the number of threads (ties go to the smaller pair of ids).
    """
    if vocab_size < 257:
        raise DataError(f"vocab_size {vocab_size} is too small: 256 bytes and {END_OF_TEXT} need 257")
    library = _byte_level(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    return ByteBPE(library)


def load_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer called "gpt2", or that of a tokenizer.json. A saved GPT-2 needs no network and runs by tiktoken.

    Raises DataError for a file that is missing, no tokenizer.json, or no byte-level BPE with <|endoftext|>.
    """
    if str(name) == "gpt2":
        return GPT2Tokenizer()
    path = Path(name)
    if not path.is_file():
        raise DataError(f"there is no tokenizer {path}: say gpt2 or the path of a tokenizer.json")
    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path} is no tokenizer.json: {error}") from error
    loaded = ByteBPE(library, str(path))
    if loaded.fingerprint() != GPT2_FINGERPRINT:
        return loaded
    return GPT2Tokenizer._from_ranks({one: rank for rank, one in enumerate(loaded._bytes[:-1])})


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END_OF_TEXT] if model.token_to_id(END_OF_TEXT) is not None else [])
    return library


def _split_rule(library: tokenizers.Tokenizer) -> str:
    """What precedes the merges, as text for the fingerprint; "gpt2" for GPT-2's own, however the library words it."""
    state = json.loads(library.to_str())
    before, normalizer = state["pre_tokenizer"] or {}, state["normalizer"]
    plain = before.get("type") == "ByteLevel" and before.get("use_regex", True) and not before.get("add_prefix_space")
    return "gpt2" if plain and normalizer is None else json.dumps([normalizer, before], sort_keys=True)


def _printable(one: bytes) -> str:
    return "".join(_CHAR_OF[byte] for byte in one)


def _halves(one: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens whose merge made `one`: what merging its bytes by lower ranks alone ends with."""
    parts = [one[at : at + 1] for at in range(len(one))]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        at = min(range(len(pairs)), key=pairs.__getitem__)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]

"""What a file is that is no raw array of ids, told by its first and last bytes, never by its name.

A raw file may begin with any ids: a mark has four bytes or more, so that one file of ids in some
thousand millions begins so.
"""

import codecs
import re

HEAD = 1 << 16
"""Bytes at the beginning of a file that are looked at."""
TAIL = 16
LEAST_TEXT = 16
"""Bytes below which nothing is told to be text."""
_CONTROLS = frozenset(range(32)) - {8, 9, 10, 12, 13, 27} | {127}

ZSTD = b"\x28\xb5\x2f\xfd"
SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
"""The beginning of a part of a zstd file that is passed over; pzstd writes one first."""


def container(head: bytes, tail: bytes) -> str | None:
    """What kind of container a file is, in words that follow "is"; None: perhaps a raw array.

    Args:
        head: its first `HEAD` bytes.
        tail: its last `TAIL` bytes.
    """
    for begins, ends, kind in _MARKS:
        if re.match(begins, head, re.DOTALL) and re.search(ends + rb"\Z", tail, re.DOTALL):
            return kind
    return None


def is_text(head: bytes, size: int) -> bool:
    """Whether a file begins as text in UTF-8 or UTF-16 does: no byte of it controls a terminal."""
    if size < LEAST_TEXT:
        return False
    wide = head.startswith((b"\xff\xfe", b"\xfe\xff"))
    decoder = codecs.getincrementaldecoder("utf-16" if wide else "utf-8")()
    try:
        text = decoder.decode(head, final=len(head) == size)
    except UnicodeDecodeError:
        return False
    return not any(ord(character) in _CONTROLS for character in text)


def is_binary(head: bytes) -> bool:
    """Whether bytes hold what controls a terminal, which text in no encoding but UTF-16 does."""
    return not head.startswith((b"\xff\xfe", b"\xfe\xff")) and any(
        byte in _CONTROLS for byte in head
    )


# version ≤ 6.3, flags, and a method of compression; then sizes and names
_ZIP = rb"PK\x03\x04[\x00-\x3f].{3}[\x00\x01\x06\x08\x09\x0c\x0e\x5d\x5f\x62\x63]\x00.{20}"
_PICKLE = rb"\x80[\x02\x03](?:[\]})]q\0|c[\w.]+\n)|\x80[\x04\x05]\x95.{3}\0{5}"

_MARKS = (
    (rb"ARROW1\0\0", b"", "an Arrow file"),
    # a message, its length, and the place of a schema in it
    (rb"\xff{4}.{2}[\0-\x0f]\0[\x04-\x40]\0{3}", b"", "an Arrow stream"),
    (rb"PAR1", b"PAR1", "a Parquet file"),
    # the header of a page or of the file, whose fields Thrift begins so
    (rb"PAR1\x15[\x00\x02\x04\x06][\x15\x19]", b"", "a Parquet file"),
    # flags, a time, how hard it was packed and where
    (rb"\x1f\x8b\x08[\0-\x1f].{4}[\0\x02\x04][\0-\x0d\xff]", b"", "compressed by gzip"),
    (rb"(?:[\x50-\x5f]\x2a\x4d\x18.{4,64})?\x28\xb5\x2f\xfd", b"", "compressed by zstd"),
    (rb"\x04\x22\x4d\x18[\x40-\x7d][\x40\x50\x60\x70]", b"", "compressed by lz4"),
    (rb"BZh[1-9](?:1AY&SY|\x17\x72\x45\x38\x50\x90)", b"", "compressed by bzip2"),
    (rb"\xfd7zXZ\0", b"", "compressed by xz"),
    (_ZIP + rb"[^\0]{0,99}\.npy", b"", "an archive of NumPy arrays (.npz)"),
    (_ZIP + rb".{0,162}data\.pkl", b"", "a file of torch.save"),
    (rb"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", b"", "a file of torch.save"),
    (_ZIP + rb"|PK\x05\x06.{18}", b"", "a zip archive"),
    (rb".{257}ustar", b"", "a tar archive"),
    (_PICKLE, rb"\.", "a pickle"),
    # protocols 0 and 1 begin with a list, a table or a class
    (rb"\(lp|\(dp|\]q\0|\}q\0|cnumpy|ccopy_reg", rb"\.", "a pickle"),
    # the length of its header, which names a tensor first, or what is said of all
    (rb".{4}\0{4}\{\s*\"[^\"]*\"\s*:\s*\{", b"", "a safetensors file"),
    # a length, a checksum, and a message in a message
    (rb".{3}\0{5}.{4}\n[\x80-\xff]{0,3}[\0-\x7f]\n", b"", "a TFRecord file"),
    (rb"\x89HDF\r\n\x1a\n", b"", "an HDF5 file"),
    (rb"MMIDIDX\0\0", b"", "a Megatron index, whose ids are in the .bin file beside it"),
)
"""Regular expressions of how a kind begins and ends; the first that fits counts."""

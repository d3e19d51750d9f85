"""What a file is that is no raw array of ids, told by its first and last bytes, never by its name.

A raw file may begin with any ids. So a mark of four bytes is not enough: what has to follow it
must be there, too. A sound file of ids is never refused.
"""

import codecs
import lzma
import pickletools
import re
import struct
import zlib
from collections.abc import Callable
from io import BytesIO

import numpy as np

HEAD = 1 << 16
"""Bytes at the beginning of a file that are looked at."""
TAIL = 16
LEAST_TEXT = 16
"""Bytes below which nothing is told to be text."""
_SAMPLES = 8
"""Samples of a shard below which its table of places is not told from ids."""
_UNKNOWN_LENGTH = (1 << 64) - 1
"""Of what a file of LZMA holds: a mark ends it."""
_LONGEST_IN_LZMA = 1 << 38
_MOST_OF_LZMA = 1 << 22
"""Bytes that are unpacked to tell a file of LZMA."""
_CONTROLS = frozenset(range(32)) - {8, 9, 10, 12, 13, 27} | {127}

Test = Callable[[bytes, bytes, int], bool]
"""Whether the head, the tail and the size of a file are those of a kind."""

ZSTD = b"\x28\xb5\x2f\xfd"
SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
"""The beginning of a part of a zstd file that is passed over; pzstd writes one first."""


def container(head: bytes, tail: bytes, size: int) -> str | None:
    """What kind of container or text a file is, in words that follow "is"; None: perhaps a raw
    array.

    Args:
        head: its first `HEAD` bytes.
        tail: its last `TAIL` bytes.
        size: bytes of all of it.
    """
    return next((kind for test, kind in _KINDS if test(head, tail, size)), None)


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


def is_json(head: bytes) -> bool:
    """Whether text begins as an object or a list in JSON does."""
    return re.match(rb'(?:\xef\xbb\xbf)?\s*(?:\{\s*"|\[\s*[\[{"])', head) is not None


def is_numbers(head: bytes, size: int) -> bool:
    """Whether a file begins as numbers in text do: digits, and what divides them in JSON, CSV or
    lines.
    """
    return (
        size >= LEAST_TEXT
        and re.fullmatch(rb"[\s\[\],;:+.eE-]*\d[\d\s\[\],;:+.eE-]*", head) is not None
    )


def _marked(begins: bytes, ends: bytes = b"") -> Test:
    """A test by regular expressions of the first and of the last bytes."""
    head_mark = re.compile(begins, re.DOTALL)
    tail_mark = re.compile(ends + rb"\Z", re.DOTALL)

    def test(head: bytes, tail: bytes, size: int) -> bool:
        return head_mark.match(head) is not None and tail_mark.search(tail) is not None

    return test


_ZIP = (
    # version ≤ 6.3, flags, and a method of compression; then sizes and names
    rb"PK\x03\x04[\x00-\x3f].{3}[\x00\x01\x06\x08\x09\x0c\x0e\x5d\x5f\x62\x63]\x00.{20}"
)
_is_zip = _marked(_ZIP + rb"|PK\x05\x06.{18}")


def _is_arrays(head: bytes, tail: bytes, size: int) -> bool:
    return _is_zip(head, tail, size) and head[
        30 : 30 + int.from_bytes(head[26:28], "little")
    ].endswith(b".npy")


def _deflated(begins: bytes, wbits: int) -> Test:
    """A test whether a file begins so, and as a stream of zlib that unpacks.

    Args:
        wbits: container of the stream, as `zlib` numbers them.
    """

    def test(head: bytes, tail: bytes, size: int) -> bool:
        if not head.startswith(begins):
            return False
        stream = zlib.decompressobj(wbits)
        try:
            unpacked = stream.decompress(head, HEAD)
        except zlib.error:
            return False
        return stream.eof or len(unpacked) == HEAD or (bool(unpacked) and len(head) < size)

    return test


def _is_lzma(head: bytes, tail: bytes, size: int) -> bool:
    """The older container of LZMA, which has no mark: properties, the size of its dictionary and of
    what it holds, and bits that follow from these.

    Zeros and repeated ids decode as something, too. But a range coder writes what looks like noise,
    which nothing packs further, and all of it decodes. The sizes are those that liblzma takes for
    possible where it guesses the format.
    """
    if len(head) < 18 or head[0] >= 225 or head[13] != 0:
        return False
    dictionary = int.from_bytes(head[1:5], "little")
    bits = dictionary.bit_length()
    if dictionary < 4096 or dictionary not in (1 << bits - 1, 3 << bits - 2):
        return False
    length = int.from_bytes(head[5:13], "little")
    if length != _UNKNOWN_LENGTH and not 0 < length < _LONGEST_IN_LZMA:
        return False
    body = head[13:]
    if 10 * len(zlib.compress(body, wbits=-15)) < 9 * len(body):
        return False
    # nothing that is decoded here lies further back than `_MOST_OF_LZMA`
    stream = lzma.LZMADecompressor(lzma.FORMAT_ALONE)
    data = head[:1] + _MOST_OF_LZMA.to_bytes(4, "little") + head[5:]
    count = 0
    try:
        while data or not (stream.eof or stream.needs_input or count >= _MOST_OF_LZMA):
            count += len(stream.decompress(data, HEAD))
            data = b""
    except lzma.LZMAError:
        return False
    if not stream.eof:
        return count >= _MOST_OF_LZMA or (len(head) < size and count > 0)
    ended = len(head) == size and not stream.unused_data
    return ended and length in (count, _UNKNOWN_LENGTH)


def _is_zstd(head: bytes, tail: bytes, size: int) -> bool:
    """A frame: a mark, its header, and blocks of 128 KiB at most, one after another (RFC 8878)."""
    if not head.startswith(ZSTD) or len(head) < 9 or head[4] & 0x18:
        return False
    one_segment = head[4] >> 5 & 1
    length_of_size = (one_segment, 2, 4, 8)[head[4] >> 6]
    at = 5 + (1 - one_segment) + (0, 1, 2, 4)[head[4] & 3] + length_of_size
    last = 0
    while not last and at + 3 <= len(head):
        block = int.from_bytes(head[at : at + 3], "little")
        last = block & 1
        kind = block >> 1 & 3
        length = block >> 3
        at += 3 + (1 if kind == 1 else length)
        if kind == 3 or length > 1 << 17 or at > size or not (length or last):
            return False
    return bool(last) or len(head) < size


def _is_zstd_after_a_skippable_frame(head: bytes, tail: bytes, size: int) -> bool:
    at = 0
    while SKIPPABLE.match(head, at) and at + 8 <= len(head):
        at += 8 + int.from_bytes(head[at + 4 : at + 8], "little")
    return at > 0 and head.startswith(ZSTD, at)


def _is_lz4(head: bytes, tail: bytes, size: int) -> bool:
    """A frame: a mark, version 1 and its flags, the most bytes of a block, and a first block that
    has no more, or none.
    """
    if not head.startswith(b"\x04\x22\x4d\x18") or len(head) < 11:
        return False
    flags = head[4]
    largest = head[5]
    if flags >> 6 != 1 or flags & 2 or largest & 0x8F or largest < 0x40:
        return False
    at = 7 + 8 * (flags >> 3 & 1) + 4 * (flags & 1)
    block = int.from_bytes(head[at : at + 4], "little") & 0x7FFFFFFF
    return block <= 1 << 8 + 2 * (largest >> 4) and at + 4 + block <= size


def _is_riff(head: bytes, tail: bytes, size: int) -> bool:
    return head.startswith(b"RIFF") and int.from_bytes(head[4:8], "little") + 8 == size


def _is_lmdb(head: bytes, tail: bytes, size: int) -> bool:
    """Two pages of meta data: flags of the page, and the magic number and version behind them."""
    return size % 4096 == 0 and head[16:24] == b"\xde\xc0\xef\xbe\1\0\0\0"


def _is_samples(head: bytes, tail: bytes, size: int) -> bool:
    """The number of samples n, and n + 1 places of 32 bits, which rise to the end of the file."""
    if len(head) < 12:
        return False
    count = int.from_bytes(head[:4], "little")
    last = 4 + 4 * count
    if count < _SAMPLES or last + 4 > size:
        return False
    table = np.frombuffer(head[4 : min(last + 4, len(head) // 4 * 4)], "<u4").astype(np.int64)
    rising = bool((np.diff(table) >= 0).all())
    if not rising or table[0] < last + 4 or table[-1] > size:
        return False
    return len(table) > 1024 or (len(table) == count + 1 and table[-1] == size)


def _is_safetensors(head: bytes, tail: bytes, size: int) -> bool:
    if len(head) < 10 or head[8:9] != b"{":
        return False
    length = int.from_bytes(head[:8], "little")
    return 2 <= length <= min(size - 8, 100_000_000) and head[9:10] in b'"} \n\t\r'


def _is_pickle(head: bytes, tail: bytes, size: int) -> bool:
    """Protocol 2 and later: a mark, operations that are some, and a stop at the end of the file."""
    if head[:1] != b"\x80" or not 2 <= head[1] <= 5 or not tail.endswith(b"."):
        return False
    try:
        for number, _ in enumerate(pickletools.genops(BytesIO(head))):
            if number > 8:
                return True
    except ValueError as error:
        return len(head) < size and "exhausted" in str(error)
    return True


def _is_records_of_tensorflow(head: bytes, tail: bytes, size: int) -> bool:
    """A length of 64 bits, and the masked CRC-32C of these eight bytes."""
    if len(head) < 16 or not 0 < int.from_bytes(head[:8], "little") <= size - 16:
        return False
    crc = 0xFFFFFFFF
    for byte in head[:8]:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return int.from_bytes(head[8:12], "little") == masked


def _is_arrow_stream(head: bytes, tail: bytes, size: int) -> bool:
    """A message that is a schema: `continuation, length, root offset, …` and in the root's table
    type 1 of header.
    """
    if not head.startswith(b"\xff\xff\xff\xff") or len(head) < 32:
        return False
    length, root = struct.unpack_from("<iI", head, 4)
    if (
        not 0 < length <= size - 8
        or length % 8
        or not 4 <= root <= length - 4
        or 8 + root + 4 > len(head)
    ):
        return False
    table = 8 + root
    fields = table - int.from_bytes(head[table : table + 4], "little", signed=True)
    if not 8 <= fields <= len(head) - 8:
        return False
    place = table + int.from_bytes(head[fields + 6 : fields + 8], "little")
    return head[place : place + 1] == b"\x01"


_KINDS: tuple[tuple[Test, str], ...] = (
    (_marked(rb"ARROW1\0\0"), "an Arrow file"),
    (_marked(rb"\x89HDF\r\n\x1a\n"), "an HDF5 file"),
    (_marked(rb"SQLite format 3\0"), "an SQLite database"),
    (_marked(rb"\xfd7zXZ\0"), "compressed by xz"),
    (_marked(rb"7z\xbc\xaf\x27\x1c"), "a 7z archive"),
    (_marked(rb"Rar!\x1a\x07"), "a RAR archive"),
    (_marked(rb"%PDF-"), "a PDF file"),
    (_marked(rb"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\."), "a file of torch.save"),
    (_marked(rb"MMIDIDX\0\0"), "a Megatron index, whose ids are in the .bin file beside it"),
    (_marked(rb"LITPKDS"), "a file of lit-gpt's PackedDataset"),
    (_marked(rb"MATLAB 5\.0 MAT-file"), "a file of MATLAB"),
    (_marked(rb"\xff\x06\0\0sNaPpY"), "compressed by snappy"),
    (_marked(rb"LZIP\x01"), "compressed by lzip"),
    (_marked(rb"\x89PNG\r\n\x1a\n"), "a picture (PNG)"),
    (_is_arrays, "an archive of NumPy arrays (.npz)"),
    (_marked(_ZIP + rb".{0,162}data\.pkl"), "a file of torch.save"),
    (_is_zip, "a zip archive"),
    (_deflated(b"\x1f\x8b\x08", 31), "compressed by gzip"),
    (_deflated(b"\x78", 15), "compressed by zlib"),
    (_is_lzma, "compressed by lzma"),
    (_is_zstd, "compressed by zstd"),
    (_is_zstd_after_a_skippable_frame, "compressed by zstd"),
    (_is_lz4, "compressed by lz4"),
    (_marked(rb"BZh[1-9](?:1AY&SY|\x17\x72\x45\x38\x50\x90)"), "compressed by bzip2"),
    # the same mark at the end, or the header of a page or of the file, whose fields Thrift begins so
    (_marked(rb"PAR1", rb"PAR1"), "a Parquet file"),
    (_marked(rb"PAR1\x15[\x00\x02\x04\x06][\x15\x19]"), "a Parquet file"),
    (_marked(rb"PARE", rb"PARE"), "an encrypted Parquet file"),
    (_marked(rb"FEA1", rb"FEA1"), "a Feather file"),
    (_marked(rb"FEA1\0{4}"), "a Feather file"),
    (_marked(rb"Obj\x01.*avro\.schema"), "an Avro file"),
    # a version, of either order of bytes
    (_marked(rb"GGUF(?:[\x01-\x0f]\0\0\0|\0\0\0[\x01-\x0f])"), "a GGUF file"),
    # 32 or 64 bits, an order of bytes, and version 1
    (_marked(rb"\x7fELF[\x01\x02][\x01\x02]\x01"), "a program"),
    (_is_safetensors, "a safetensors file"),
    (_marked(rb".{257}ustar"), "a tar archive"),
    (_is_records_of_tensorflow, "a TFRecord file"),
    # protocols 0 and 1 begin with a list, a table or a class
    (_marked(rb"\(lp|\(dp|\]q\0|\}q\0|cnumpy|ccopy_reg", rb"\."), "a pickle"),
    (_is_pickle, "a pickle"),
    (_is_arrow_stream, "an Arrow stream"),
    (_marked(rb"ORC", rb"ORC."), "an ORC file"),
    (_is_riff, "a RIFF file (WAV, AVI)"),
    (_marked(rb"\xff\xd8\xff", rb"\xff\xd9"), "a picture (JPEG)"),
    (_is_lmdb, "an LMDB database"),
    (_is_samples, "a shard of samples (MosaicML Streaming, LitData)"),
)
"""Tests and what they tell, in words that follow "is"; the first that holds counts."""

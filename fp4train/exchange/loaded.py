"""Whether other software encodes text as the run did: the folder's tokenizer as `transformers`
loads it.

`AutoTokenizer` takes the class of some `model_type`s (Qwen2 of version 5.23 among them) whatever
`tokenizer_class` says, and that class has a normalizer and a pre-tokenizer of its own. vLLM and
SGLang load tokenizers through it. No setting of a folder avoids that, so a probe text is encoded
both ways.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp4train.data.tokens import Tokenizer
from fp4train.text import printable, shortened

PROBES = (
    "def add(a, b):\n    return a + b  # 12345 + 6.5e-3\n\n\tx  =  {'it''s': \"don't\"}\r\n",
    "The quick brown fox's jumps; WE'LL see 1,000,000 of them...   twice!!\n",
    "Äpfel, naïve café, Ångström; A\u030angstro\u0308m; ﬁne ½ ² Ⅳ\u00a0\u2009\u200bend",
    "汉字かなカナ한국어 हिन्दी العربية עברית ไทย 👩‍👩‍👧 🇩🇪 e\u0301\n",
    " leading and trailing  ",
    "",
)
"""Code, numbers, contractions, white space, letters that normalisations change, scripts without
spaces.
"""


def loaded_differently(folder: Path, tokenizer: Tokenizer | None) -> Iterator[str]:
    """A sentence where `AutoTokenizer` of the installed transformers encodes a probe in other ids
    than `tokenizer`.

    Nothing where transformers is not installed.
    """
    if tokenizer is None or importlib.util.find_spec("transformers") is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it and its parts deprecate
        transformers: Any = importlib.import_module("transformers")
        version = f"AutoTokenizer of transformers {transformers.__version__}"
        try:
            loaded: Any = transformers.AutoTokenizer.from_pretrained(str(folder))
            ids = [list(map(int, loaded(text, verbose=False)["input_ids"])) for text in PROBES]
        except Exception as error:
            yield f"{version} does not load the tokenizer: {shortened(' '.join(printable(str(error)).split()), 200)}"
            return
    for text, theirs in zip(PROBES, ids, strict=True):
        if theirs != (ours := list(tokenizer.encode(text))):
            what = f"{version} makes a {type(loaded).__name__} of the tokenizer"
            differ = (
                f"in {len(theirs)} ids where training had {len(ours)}{_first_other(ours, theirs)}"
            )
            yield f"{what}, which encodes {shortened(repr(text), 50)} {differ}"
            return


def _first_other(ours: list[int], theirs: list[int]) -> str:
    """Where two lists of ids part."""
    place = next(
        (n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None
    )
    if place is None:
        return ""
    return f", from number {place} on"


OTHER_CLASS = "PreTrainedTokenizerFast"
CURE = (
    f"`transformers.{OTHER_CLASS}.from_pretrained(FOLDER)` gives the ids of "
    "training. For vLLM and SGLang "
    "copy tokenizer.json, tokenizer_config.json and special_tokens_map.json into a folder of "
    "their own, whose "
    'config.json is {"model_type": "llama"}, and name that folder as the tokenizer '
    "(`--tokenizer`, `--tokenizer-path`)"
)
"""What serves such a folder with the ids of training."""

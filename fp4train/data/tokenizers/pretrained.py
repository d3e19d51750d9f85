"""A ready-made tokenizer: a tokenizer.json, a folder that holds one, or the name of a model on the
Hugging Face hub.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fp4train import files
from fp4train.data.files import existing_path
from fp4train.data.template import TEMPLATE, keep_template
from fp4train.data.tokenizer_settings import SETTINGS, TOKENS_MAP, keep_settings
from fp4train.data.tokenizers.json_file import LIMIT, JsonTokenizer, run_tokenizer
from fp4train.data.tokens import Documents
from fp4train.errors import data_errors, reason
from fp4train.paths import PathOrHubName, is_hub_name
from fp4train.text import first_line


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """`data/tokenizer=pretrained data.tokenizer.name=…`; `end_of_document` is a token of its own,
    null: a usual one.

    `begin_of_document` is the token that stands before each document, null: none does.
    What lies beside the file, its chat template and its special tokens, is kept with the run, too.
    """

    name: PathOrHubName
    revision: str | None = None
    end_of_document: str | None = None
    begin_of_document: str | None = None

    def build(self, documents: Documents, run_dir: Path) -> JsonTokenizer:
        if self.revision is None:
            origin = self.name
        else:
            origin = f"{self.name} {self.revision}"
        # else nothing is read but the run's own copy
        new = not (run_dir / "tokenizer.json").exists()
        tokenizer = run_tokenizer(
            run_dir, origin, self._read, self.end_of_document, self.begin_of_document
        )
        if new:
            keep_template(self.folder, run_dir)
            keep_settings(self.folder, run_dir)
        return tokenizer

    def open(self) -> JsonTokenizer:
        """The tokenizer without a copy in a run.

        Raises:
            DataError: it cannot be had, or is none.
        """
        text, what = self._read()
        return JsonTokenizer(
            text,
            end_of_document=self.end_of_document,
            begin_of_document=self.begin_of_document,
            what=what,
        )

    @property
    def folder(self) -> Path:
        """Where tokenizer.json lies, with what there is beside it; of a hub name in its cache.

        Raises:
            DataError: it cannot be had.
        """
        return self._path.parent

    def _read(self) -> tuple[str, str]:
        path = self._path
        prefix = f"data.tokenizer.name={self.name}: "
        with data_errors(OSError, before=f"{prefix}{path} cannot be read: ", message=reason):
            data = files.read(path.resolve(), LIMIT)
        with data_errors(ValueError, before=f"{prefix}{path} is no JSON file: "):
            return data.decode(), str(path)

    @cached_property
    def _path(self) -> Path:
        if not is_hub_name(self.name):
            place = existing_path(self.name, "data.tokenizer.name")
            if place.is_dir():
                return existing_path(str(place / "tokenizer.json"), "data.tokenizer.name")
            return place
        with data_errors(
            ImportError, before="a hub name needs the package huggingface_hub (", after=")"
        ):
            from huggingface_hub import hf_hub_download
            from huggingface_hub.errors import EntryNotFoundError
        cure = (
            ". Give the path of a tokenizer.json, or use data/tokenizer=bytes or data/tokenizer=bpe"
        )
        refused = f"data.tokenizer.name={self.name}: there is no such file here, and from the hub it cannot be had: "
        # no network, no such repository, gated, without a tokenizer.json, HTTP errors
        with data_errors(Exception, before=refused, after=cure, message=first_line):
            path = Path(hf_hub_download(self.name, "tokenizer.json", revision=self.revision))
            for beside in (TEMPLATE, SETTINGS, TOKENS_MAP):
                with suppress(EntryNotFoundError):
                    hf_hub_download(self.name, beside, revision=self.revision)
            return path

"""Collects the training text of the mini-MoE from installed Debian packages.

    python corpus.py --work build/testbed

Reads only files of installed packages, so that no download is needed. A hash of its name selects the split of a file:
one file in sixteen is held out. Writes `documents.jsonl` (one document per line) into the working folder, the list of
packages `corpus.json` into the folder of this script, and the two evaluation texts `calibration.txt` and `heldout.txt`
into the model folder.
"""

import argparse
import gzip
import hashlib
import html.parser
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
HELD_OUT_ONE_IN = 16
MIN_DOCUMENT_CHARS = 200
MIN_PARAGRAPH_CHARS = 200
MAX_LINE_CHARS = 500
MAX_NON_ASCII_SHARE = 0.1
MIN_LETTER_SHARE = 0.5

EVALUATION_BYTES = 400_000
EVALUATION_DOCUMENT_BYTES = 32_000
EVALUATION_LICENCE = "PSF-2.0"
# the two evaluation texts are published, so they must not have addresses of other people
WEB_ADDRESS = re.compile(r"https?://[\w./%#?=&~+:@-]+")


@dataclass(frozen=True)
class Source:
    """One Debian package, a pattern for the files to read, and the function that converts a file to text."""

    package: str
    kind: str
    licence: str
    pattern: str
    read: Callable[[bytes], str]


@dataclass(frozen=True)
class Document:
    name: str
    package: str
    kind: str
    licence: str
    held_out: bool
    text: str


class _HtmlText(html.parser.HTMLParser):
    """Keeps the text of a page: block elements end a line, `pre` keeps its white space, navigation is left out."""

    BLOCKS = re.compile(r"p|div|li|d[tdl]|tr|table|pre|h[1-6]|br|section|blockquote|[uo]l")
    HIDDEN_TAGS = re.compile(r"script|style|head|nav|footer")
    HIDDEN_CLASSES = re.compile(
        r"(?<!\S)(navheader|navfooter|sphinxsidebar|related|footer|headerlink|nav|nosearch|toc|docnav)(?!\S)"
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.hidden_tag = ""
        self.hidden_depth = 0
        self.pre_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # only the hidden element's own tag is counted, because pages do not close others such as `li` and `p`
        if self.hidden_depth:
            self.hidden_depth += tag == self.hidden_tag
        elif self.HIDDEN_TAGS.fullmatch(tag) or self.HIDDEN_CLASSES.search(dict(attrs).get("class") or ""):
            self.hidden_tag, self.hidden_depth = tag, 1
        self.pre_depth += tag == "pre"
        if self.BLOCKS.fullmatch(tag):
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if self.hidden_depth:
            self.hidden_depth -= tag == self.hidden_tag
        self.pre_depth -= tag == "pre" and self.pre_depth > 0
        if self.BLOCKS.fullmatch(tag):
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden_depth:
            self.parts.append(data if self.pre_depth else re.sub(r"\s+", " ", data))


def read_plain(data: bytes) -> str:
    return data.decode("utf-8")


def read_html(data: bytes) -> str:
    parser = _HtmlText()
    parser.feed(data.decode("utf-8"))
    return re.sub(r"\n[ \n]*\n", "\n\n", "".join(parser.parts))


def read_manual_page(data: bytes) -> str:
    command = ["groff", "-t", "-man", "-Kutf8", "-Tutf8", "-P-cbou", "-rLL=100n", "-rLT=100n"]
    return subprocess.run(command, input=data, capture_output=True, check=True).stdout.decode("utf-8")


# patterns leave out tables of numbers, generated rules, translations, and copies of other files
STDLIB = r"/usr/lib/python3\.11/(?!encodings/|pydoc_data/|lib2to3/tests/data|test/encoded_modules).*\.py"
PAGES = r"(?!.*(genindex|modindex|bookindex|requirements|crossref|keyword_index)).*\.html"
DIST = (
    r"/usr/lib/python3/dist-packages/(?!sympy/integrals/rubi|sympy/.*/tests/|.*/locale/|.*/_?parsetab|.*lextab).*\.py"
)

SOURCES = (
    Source("libpython3.11-minimal", "python", "PSF-2.0", STDLIB, read_plain),
    Source("libpython3.11-stdlib", "python", "PSF-2.0", STDLIB, read_plain),
    Source("libpython3.11-testsuite", "python", "PSF-2.0", STDLIB, read_plain),
    Source("idle-python3.11", "python", "PSF-2.0", STDLIB, read_plain),
    Source("python3.11-doc", "python_docs", "PSF-2.0", r".*/_sources/.*\.rst\.txt", read_plain),
    Source("python3-django", "python_libraries", "BSD-3-Clause", DIST, read_plain),
    Source("python3-sqlalchemy", "python_libraries", "MIT", DIST, read_plain),
    Source("python3-sympy", "python_libraries", "BSD-3-Clause", DIST, read_plain),
    Source("python3-twisted", "python_libraries", "MIT", DIST, read_plain),
    Source("python-django-doc", "django_docs", "BSD-3-Clause", rf".*/html/{PAGES}", read_html),
    Source("linux-doc-6.1", "linux_docs", "GPL-2.0", r".*/_sources/(?!translations/).*\.rst\.txt", read_plain),
    Source("manpages", "manual_pages", "as each page says", r".*/man/man\d/.*\.gz", read_manual_page),
    Source("manpages-dev", "manual_pages", "as each page says", r".*/man/man\d/.*\.gz", read_manual_page),
    Source("perl-doc", "perl_docs", "Artistic or GPL-1+", r"(?!.*perltoc).*\.pod", read_plain),
    Source("perl-modules-5.36", "perl_docs", "Artistic or GPL-1+", r".*\.pod", read_plain),
    Source("git-doc", "git_docs", "GPL-2.0", r".*\.txt", read_plain),
    Source("postgresql-doc-15", "database_docs", "PostgreSQL", rf".*/html/{PAGES}", read_html),
    Source("sqlite3-doc", "database_docs", "public domain", rf"/usr/share/doc/{PAGES}", read_html),
    Source("debian-policy", "debian_docs", "GPL-2.0+", r".*/_sources/.*\.rst\.txt", read_plain),
    Source("debian-reference-en", "debian_docs", "GPL-2.0+", r".*\.txt\.gz", read_plain),
    Source("debian-handbook", "debian_docs", "GPL-2.0+ or CC-BY-SA-3.0+", rf".*/html/en-US/{PAGES}", read_html),
    Source("developers-reference", "debian_docs", "GPL-2.0+", r".*/_sources/.*\.rst\.txt", read_plain),
)


def package_version(package: str) -> str | None:
    """Return the installed version of a Debian package, or None."""
    command = ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${Version}", package]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return shown[1] if len(shown) == 2 and shown[0] == "installed" else None


def package_files(source: Source) -> list[Path]:
    """List the regular files of an installed package that match the source's pattern, sorted by name."""
    listing = subprocess.run(["dpkg", "--listfiles", source.package], capture_output=True, text=True, check=True)
    pattern = re.compile(source.pattern)
    paths = (Path(line) for line in sorted(listing.stdout.splitlines()) if pattern.fullmatch(line))
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % HELD_OUT_ONE_IN == 0


def clean(text: str) -> str:
    """Remove control characters, too long lines, trailing white space and runs of more than two blank lines."""
    text = re.sub(r"[^\S\n\t ]|[\x00-\x08\x0e-\x1f\x7f\ufeff]", " ", text.replace("\r\n", "\n"))
    lines = (line.rstrip() for line in text.split("\n") if len(line) <= MAX_LINE_CHARS)
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n") + "\n"


def is_prose_or_code(text: str) -> bool:
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return letters >= MIN_LETTER_SHARE * len(text)


class ParagraphFilter:
    """Removes repeated long paragraphs, and tables of numbers. Short paragraphs are kept."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()

    def __call__(self, text: str) -> str:
        return "\n\n".join(paragraph for paragraph in text.split("\n\n") if self._keep(paragraph))

    def _keep(self, paragraph: str) -> bool:
        if len(paragraph) < MIN_PARAGRAPH_CHARS:
            return True
        digest = hashlib.sha256(" ".join(paragraph.split()).encode()).digest()
        if digest in self.seen or not is_prose_or_code(paragraph):
            return False
        self.seen.add(digest)
        return True


def read_documents(source: Source) -> Iterator[Document]:
    """Read the cleaned documents of one source, without files that are not UTF-8, not mostly ASCII, or very short."""
    for path in package_files(source):
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        try:
            text = clean(source.read(data))
        except UnicodeDecodeError:
            continue
        non_ascii = sum(character > "\x7f" for character in text)
        if len(text) < MIN_DOCUMENT_CHARS or non_ascii > MAX_NON_ASCII_SHARE * len(text):
            continue
        name = f"{source.package}{path}"
        yield Document(name, source.package, source.kind, source.licence, is_held_out(name), text)


def deduplicate(documents: Iterable[Document]) -> list[Document]:
    """Remove repeated paragraphs; held-out files come first, so that they keep paragraphs that both splits have."""
    keep = ParagraphFilter()
    kept = []
    for document in sorted(documents, key=lambda document: not document.held_out):
        text = keep(document.text)
        if len(text) >= MIN_DOCUMENT_CHARS:
            kept.append(Document(**{**vars(document), "text": text}))
    return kept


def listing(versions: dict[str, str | None], documents: list[Document]) -> dict:
    """Return the list of packages: version, licence, files, bytes, and a hash of names and texts."""
    packages = []
    for source in SOURCES:
        own = [document for document in documents if document.package == source.package]
        digest = hashlib.sha256()
        for document in sorted(own, key=lambda document: document.name):
            digest.update(f"{document.name}\0{document.text}\0".encode())
        entry = {
            "package": source.package,
            "version": versions[source.package],
            "kind": source.kind,
            "licence": source.licence,
        }
        for split, held_out in (("train", False), ("held_out", True)):
            texts = [document.text for document in own if document.held_out == held_out]
            entry[split] = {"files": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
        packages.append({**entry, "sha256": digest.hexdigest()})
    return {
        "rule": f"a file is held out if sha256(package + path) is a multiple of {HELD_OUT_ONE_IN}",
        "missing": [package for package, version in versions.items() if version is None],
        "bytes": {split: sum(entry[split]["bytes"] for entry in packages) for split in ("train", "held_out")},
        "packages": packages,
    }


def evaluation_texts(documents: list[Document]) -> dict[str, str]:
    """Build two texts from different held-out files, half code and half prose, all under one licence.

    Files that mention a copyright or a licence are left out, so that one licence covers both texts. Long files are cut
    at a line end, so that each text consists of many files. Web addresses are replaced.
    """
    texts = {"calibration.txt": "", "heldout.txt": ""}
    for kind in ("python", "python_docs"):
        pool = [
            document
            for document in documents
            if document.held_out
            and document.kind == kind
            and document.licence == EVALUATION_LICENCE
            and not re.search(r"copyright|licen[cs]e", document.text, re.IGNORECASE)
        ]
        pool.sort(key=lambda document: hashlib.sha256(document.name.encode()).digest())
        half = dict.fromkeys(texts, "")
        for document in pool:
            name = min(half, key=lambda name: len(half[name]))
            if len(half[name]) < EVALUATION_BYTES // 2:
                cut = WEB_ADDRESS.sub("https://example.org", document.text[:EVALUATION_DOCUMENT_BYTES])
                half[name] += cut[: cut.rindex("\n")] + "\n\n\n"
        for name in texts:
            texts[name] += half[name][: EVALUATION_BYTES // 2]
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="working folder for documents.jsonl")
    parser.add_argument("--model", type=Path, default=HERE / "mini_moe", help="folder for the evaluation texts")
    arguments = parser.parse_args()
    if shutil.which("dpkg") is None or shutil.which("groff") is None:
        sys.exit("dpkg or groff is not installed: corpus.py needs both to read Debian packages and manual pages")

    versions = {source.package: package_version(source.package) for source in SOURCES}
    missing = [package for package, version in versions.items() if version is None]
    if missing:
        print(f"Left out, because not installed: {' '.join(missing)}", file=sys.stderr)
    present = (source for source in SOURCES if versions[source.package] is not None)
    documents = deduplicate(document for source in present for document in read_documents(source))

    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.model.mkdir(parents=True, exist_ok=True)
    with open(arguments.work / "documents.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(vars(document), ensure_ascii=False) + "\n" for document in documents)
    summary = listing(versions, documents)
    (HERE / "corpus.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    for name, text in evaluation_texts(documents).items():
        (arguments.model / name).write_text(text, encoding="utf-8")
    print(f"{len(documents)} documents, bytes {summary['bytes']}, missing {missing or 'nothing'}")


if __name__ == "__main__":
    main()

"""Rules of plain English for docstrings, comments and pages, and the places that break them."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Openings that make sense only to a reader who has the code in view already.
OPENINGS = re.compile(
    r"(?:Who|Whom|What|Whose|Whether|Of|It|The same|So|That|As|Those)\b(?!\))", re.ASCII
)
# Processes are not people.
WORDS = re.compile(
    r"\b(?:hears?|heard|tells?|told|knows of|forgets?|believes?|mourns?|politely|nobody|somebody"
    r"|everybody|whoever|whom)\b",
    re.IGNORECASE,
)
MOST_WORDS = 40  # in a sentence
# A function's docstring begins with one of these.
_VERBS = (
    "Accept Account Accumulate Act Add Address Adjust Advance Advise Allow Answer Append Apply "
    "Ask Attach Attribute Average Bind Blame Block Bring Broadcast Build Call Cast Catch Change "
    "Check Choose Clear Clip Close Collect Compare Compile Complete Compute Confirm Connect "
    "Continue Convert Copy Count Create Cut Decide Declare Decode Define Delay Delete Describe "
    "Detect Discard Distribute Divide Do Download Drain Draw Drop Emit Empty Encode End Ensure "
    "Enter Erase Escape Estimate Evaluate Exchange Exclude Expect Export Extend Extract Fetch "
    "Fill Find Finish Fit Flush Fold Follow Forecast Format Free Freeze Gather Get Give Go "
    "Handle Hash Have Hold Identify Ignore Import Inform Initialise Insert Install Interpolate "
    "Join Judge Keep Kill Know Launch Leave Let Limit Link List Listen Load Lock Log Look Make "
    "Map Mark Match Measure Merge Mirror Move Multiply Name Normalise Note Notify Observe Offer "
    "Open Order Pack Parse Pass Pause Pick Place Plan Postpone Prepare Print Process Propose "
    "Prove Publish Put Queue Quote Raise Re-raise Reach Read Receive Record Reduce Refuse "
    "Register Release Remember Remove Rename Reorder Repeat Replace Report Request Reserve "
    "Reset Restart Restore Resume Retry Return Round Run Sample Save Scale Scan Search See Seed "
    "Select Send Serve Set Settle Share Shift Show Signal Silence Skip Sleep Sort Split Spread "
    "Start Step Stop Store Submit Subtract Sum Summarise Suppress Swap Switch Synchronise Take "
    "Test Time Train Transform Translate Try Turn Undo Unite Unpack Unscale Update Use Validate "
    "Verify Visit Wait Wake Warn Watch Weigh Work Wrap Write Yield Zero "
)  # fmt: skip
VERBS = frozenset(_VERBS.split())
# Names of functions, classes and fields that are participles or pronouns, or "x of y".
NAMES = re.compile(
    r"_?(?:told|said|kept|found|heard|unheard|same|alike|whole|of|who|what|hear|tell)"
    r"|\w+_of|(?:tell|told|hear|who|what|of)_\w+|\w+(?:Told|Heard|Asked|Unheard)"
)
# A user's task overrides the first. The second is the middle part of an error: cause, found, fix.
# The third is a field of a file's format.
EXCEPTED = {"name_of", "found", "kept"}
# A sentence ends with a mark that a blank and a capital letter follow, or with its paragraph.
_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[\"'(`]*[A-Z])")
_FIELD = re.compile(r"\s+([\w*]+(?:, [\w*]+)*): (.*)")
_CODE = re.compile(r"``.*?``|`[^`]*`|:\w+:`[^`]*`", re.DOTALL)


@dataclass(frozen=True)
class Finding:
    """A sentence that breaks a rule.

    Attributes:
        rule: ``opening``, ``word`` or ``length``.
    """

    path: Path
    line: int
    rule: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.sentence[:100]}"


def find_in_python(path: Path) -> Iterator[Finding]:
    """Yield what breaks a rule in the docstrings and comments of a file."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc:
                at = node.body[0].lineno
                if _is_function(node) and doc.split()[0].rstrip(".,:;") not in VERBS:
                    yield Finding(path, at, "verb", doc.splitlines()[0])
                yield from _check(path, at, _plain_docstring(doc))
    block, at, last = list[str](), 0, -2
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        alone = not token.line[: token.start[1]].strip()
        if not alone or line != last + 1:
            yield from _check(path, at, [" ".join(block)])
            block, at = [], line
        block.append(token.string.lstrip("#").strip())
        last = line if alone else -2
    yield from _check(path, at, [" ".join(block)])


def _is_function(node: ast.AST) -> bool:
    """Return True for a function or method that is no property, which a noun describes."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not any("property" in ast.unparse(each) for each in node.decorator_list)


def find_names(path: Path) -> Iterator[Finding]:
    """Yield functions, classes and fields of a file whose names break a rule."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            names = [each.target.id for each in fields if isinstance(each.target, ast.Name)]
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(node.name)
        for name in names:
            if NAMES.fullmatch(name) and name not in EXCEPTED:
                yield Finding(path, node.lineno, "name", name)


def find_in_markdown(path: Path) -> Iterator[Finding]:
    """Yield what breaks a rule in a page, outside of code and tables."""
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and line.strip() and not line.startswith(("|", "#")):
            yield from _check(path, number, [line.lstrip("-*0123456789. >")])


def _plain_docstring(doc: str) -> list[str]:
    """Return the paragraphs of a docstring without code, field names and headings."""
    found = []
    for paragraph in re.split(r"\n\s*\n", doc):
        lines = paragraph.splitlines()
        if all(line.startswith("    ") for line in lines) and not re.match(
            r"\s+\w[\w, ]*:", lines[0]
        ):
            continue  # an example
        kept = list[str]()
        for line in lines:
            if re.fullmatch(r"\s*(Args|Attributes|Returns|Raises|Yields|Example|Examples):", line):
                found.append(" ".join(kept))
                kept = []
            elif match := _FIELD.match(line):
                found.append(" ".join(kept))
                kept = [match[2][:1].lower() + match[2][1:]]
            else:
                kept.append(line.strip())
        found.append(" ".join(kept))
    return found


def _check(path: Path, line: int, paragraphs: list[str]) -> Iterator[Finding]:
    for paragraph in paragraphs:
        for sentence in filter(None, _END.split(_CODE.sub("`x`", paragraph).strip())):
            if OPENINGS.match(sentence):
                yield Finding(path, line, "opening", sentence)
            if word := WORDS.search(sentence):
                yield Finding(path, line, f"word {word[0].lower()}", sentence)
            if len(sentence.split()) > MOST_WORDS:
                yield Finding(path, line, "length", sentence)

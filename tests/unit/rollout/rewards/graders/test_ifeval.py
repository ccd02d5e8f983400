"""IFEval's constraints: each followed and broken, and the forms in which rows give them."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rollout.rewards.graders import constraints
from rollout.rewards.graders.constraints import IFEVAL, OPEN_INSTRUCT
from rollout.rewards.graders.ifeval import CONSTRAINTS, constraints_of, ifeval

# constraint, keywords, a response that follows it, one that does not
CASES = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A Cat and a dog", "A cat"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "a b a", "a"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "less than"}, "a", "a a"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", "The Cat sat"),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_frequency": 3, "let_relation": "at least"},
        "Eel tree",
        "Eel",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        "One. Two! Three?",
        "It is 3.5 long. Two.",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        "One. Two",
        "One. Two! And three",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a *** b ***", "a *** *** b"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "a b, c", "a b"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First.\n\n'Then', so",
        "Then.\n\nFirst",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "then"},
        "First.\n\nThen.\n\nLast.",
        "First.\n\nThen.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] and [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hi\nP. S. bye", "Hi\nps"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Hi P.P.S bye", "P.S. bye"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n**b**"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* *b*", "*a* **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1 a SECTION 2 b",
        "SECTION 1 a",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A title>> text", "<< >> text"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Why?"}, "why? Because", "Because"),
    ("startend:end_checker", {"end_phrase": "The end."}, "So. the end. ", "The end"),
    ("startend:quotation", {}, '"Hello"', '"Hello'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NO WAY Jose",
        "NO Way",
    ),
    ("change_case:english_capital", {}, "HELLO!", "HELLo"),
    ("change_case:english_lowercase", {}, "hello!", "Hello"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
]


@pytest.mark.parametrize(("name", "keywords", "follows", "breaks"), CASES)
def test_each_constraint(sample, name, keywords, follows, breaks):
    label = {"instruction_id": [name], "kwargs": [keywords]}
    assert ifeval(sample(follows, label))["correct"], follows
    assert not ifeval(sample(breaks, label))["correct"], breaks


def test_all_or_a_share_of_the_constraints(sample):
    label = {
        "instruction_id": ["punctuation:no_comma", "change_case:english_lowercase"],
        "kwargs": [None, {}],
    }
    assert ifeval(sample("hello", label))["score"] == 1.0
    assert ifeval(sample("Hello", label))["score"] == 0.0
    half = ifeval(sample("<think>a,</think>Hello", label), score="share")
    assert (half["score"], half["correct"]) == (0.5, False)
    assert half["info"] == {
        "0:punctuation:no_comma": True,
        "1:change_case:english_lowercase": False,
    }
    assert ifeval(sample(" ", label), score="share")["score"] == 0.0


def test_the_forms_in_which_rows_give_constraints():
    given = {
        "instruction_id": ["keywords:existence"],
        # as parquet fills it
        "kwargs": [{"keywords": ["a"], "num_words": None, "relation": None}],
    }
    expected = [("keywords:existence", {"keywords": ["a"]})]
    google = {"instruction_id_list": given["instruction_id"], "kwargs": given["kwargs"]}
    for label in (given, [given], json.dumps([given]), google):
        assert constraints_of(label, {}) == expected
    assert constraints_of(None, google) == expected
    assert constraints_of(None, {**google, "kwargs": json.dumps(given["kwargs"])}) == expected


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("4", "expected constraints as"),
        ({"instruction_id": ["x:y"], "kwargs": [{}]}, "the constraint 'x:y' is unknown; known are"),
        ({"instruction_id": ["keywords:existence"], "kwargs": [{}]}, "argument: 'keywords'"),
        ({"instruction_id": ["punctuation:no_comma"], "kwargs": []}, "1 constraints, but 0 kwargs"),
        (
            {
                "instruction_id": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 3, "relation": "around"}],
            },
            "relation 'around' is not in",
        ),
        ({"func_name": "validate_haiku", "N": None}, "'validate_haiku' is unknown; known are"),
        ({"func_name": "verify_bullet_points", "N": None}, "argument: 'N'"),
        (
            {"func_name": "validate_word_constraint", "N": 9, "quantifier": "about"},
            "quantifier 'about' is not in",
        ),
    ],
)
def test_constraints_that_nothing_can_check_are_refused(label, message):
    with pytest.raises(ValueError, match=message):
        constraints_of(label, {})


# each kind of parameter: values that are none, and how else a good one may be written
WRONG: dict[str, list[Any]] = {
    "Count": ["3", "three", -1, 2.5, math.inf, True, [3], {}],
    "Ordinal": ["3", 0, -1, 2.5, True, [3]],
    "Phrase": ["", 3, ["a"], {"a": 1}, True],
    "Phrases": ["cat", [], [""], [3], ["a", None], [["a"]], {"a": 1}, 3],
    "Letter": ["", "ab", " ", 3, ["a"]],
    "Language": ["English", "", "EN", 3],
    "Relation": ["around", "at most", "", 3, ["at least"]],
    "Quantifier": ["less than", "about", "", 3],
}
SAME: dict[str, Any] = {
    "Count": [float, np.int64, np.float64],
    "Ordinal": [float, np.int32],
    "Phrases": [tuple, np.array, json.dumps, repr],
}


def test_every_parameter_of_every_constraint_has_a_type_and_is_checked():
    """A value of another type, a missing, an unknown and a null one, for all constraints."""
    cases = {name: keywords for name, keywords, *_ in (*CASES, *OPEN_INSTRUCT_CASES)}
    languages = {"language:response_language", "validate_response_language"}
    assert CONSTRAINTS.keys() - cases.keys() == languages
    assert set(IFEVAL).isdisjoint(OPEN_INSTRUCT)
    names = {id(getattr(constraints, name)): name for name in WRONG}
    checked = Counter()
    for name, constraint in CONSTRAINTS.items():
        good = cases.get(name, {"language": "zh-cn"})
        kinds = {
            key: names[id(constraints.TYPES[key])] for key in constraint.parameters.model_fields
        }

        def read(given, name=name):
            return constraints_of({"instruction_id": [name], "kwargs": [given]}, {})

        if name in languages:
            for one in WRONG["Language"]:
                with pytest.raises(ValidationError):
                    constraint.parameters(language=one)
            assert constraint.parameters(**good)
            continue
        assert read({**good, "seed": None, "x": math.nan}) == [(name, good)]
        with pytest.raises(ValueError, match=rf"{name}: it has no argument 'typo'; it takes "):
            read({**good, "typo": 1})
        for key, value in good.items():
            for one in WRONG[kinds[key]]:
                with pytest.raises(ValueError, match=rf"the constraint {name}: {key}"):
                    read({**good, key: one})
            for given in ({k: v for k, v in good.items() if k != key}, {**good, key: None}):
                with pytest.raises(ValueError, match=rf"missing a required argument: '{key}'"):
                    read(given)
            for write in SAME.get(kinds[key], ()):
                assert read({**good, key: write(value)}) == [(name, good)]
            checked[kinds[key]] += 1
    assert checked.keys() == WRONG.keys() - {"Language"}


@pytest.mark.parametrize("write", [repr, json.dumps, lambda value: f" {value!r}\n"])
def test_labels_as_text_of_python_or_json(write):
    """allenai/IF_multi_constraints_upto5 writes its labels as Python does."""
    given = {
        "instruction_id": ["keywords:existence", "punctuation:no_comma", "startend:quotation"],
        "kwargs": [{"keywords": ["it's", 'a "b"'], "relation": None}, None, {}],
    }
    expected = [
        ("keywords:existence", {"keywords": ["it's", 'a "b"']}),
        ("punctuation:no_comma", {}),
        ("startend:quotation", {}),
    ]
    for label in (write([given]), write(given), [write(given)]):
        assert constraints_of(label, {}) == expected
    apart = {**given, "kwargs": [write(one) for one in given["kwargs"]]}
    assert constraints_of(apart, {}) == expected
    one = {"func_name": "verify_bullet_points", "N": 3, "quantifier": None, "word": None}
    assert constraints_of(write(one), {}) == [("verify_bullet_points", {"N": 3})]
    assert constraints_of(None, {key: write(value) for key, value in given.items()}) == expected


@pytest.mark.parametrize(
    "label",
    [
        {"instruction_id": "punctuation:no_comma", "kwargs": [{}]},
        {"instruction_id": ["punctuation:no_comma"], "kwargs": {}},
        {"instruction_id": ["punctuation:no_comma"], "kwargs": None},
        {"instruction_id": [], "kwargs": []},
        {"instruction_id": [None], "kwargs": [{}]},
        {"instruction_id": [["punctuation:no_comma"]], "kwargs": [{}]},
        {"instruction_id": ["punctuation:no_comma"], "kwargs": [{}, {}]},
        {"instruction_id": ["punctuation:no_comma"], "kwargs": [["a"]]},
        {"instruction_id": ["punctuation:no_comma"], "kwargs": ["text"]},
        {"func_name": None},
        *("__import__('os')", "[" * 9999, "{[]: 1}", "", None, 5, True, []),
    ],
)
def test_other_labels_of_constraints_are_refused_and_never_raise_anything_else(label):
    with pytest.raises(ValueError, match="constraint"):
        constraints_of(label, {})


# open-instruct's function, its keywords, a response that follows it, one that does not
OPEN_INSTRUCT_CASES = [
    ("verify_keywords", {"keyword_list": ["cat", "dog"]}, "A Cat and dogs", "A cat"),
    ("verify_keyword_frequency", {"word": "a", "N": 2}, "A b a", "a a, a"),
    ("validate_forbidden_words", {"forbidden_words": ["cat"]}, "dog", "concatenate"),
    ("verify_letter_frequency", {"letter": "e", "N": 2}, "E tree", "Eel tree"),
    ("verify_paragraph_count", {"N": 2}, "a\n* * *\nb", "a\n***\nb"),
    ("verify_paragraph_count", {"N": 2}, "a * * * b", "a * * *"),
    ("validate_word_constraint", {"N": 3, "quantifier": "at most"}, "a b-c d", "a b c d"),
    ("validate_word_constraint", {"N": 30, "quantifier": "around"}, "a " * 27, "a " * 26),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "at least"}, "One. Two", "e.g. Dr. No"),
    ("verify_sentence_constraint", {"N": 3, "quantifier": "around"}, "One. Two", "One"),
    ("validate_paragraphs", {"N": 2, "first_word": "So", "i": 2}, "a\n\nSo b", "So\n\na"),
    ("validate_paragraphs", {"N": 1, "first_word": "So", "i": 1}, "So", "a\n\nSo"),
    ("verify_postscript", {"postscript_marker": "P.S."}, "Hi P.S. bye", "Hi P.S."),
    ("validate_placeholders", {"N": 2}, "[a] [b]", "[a"),
    ("verify_bullet_points", {"N": 2}, "* a\n  - b", "* a"),
    ("validate_title", {}, "<<a>> b", "<a>"),
    ("validate_choice", {"options": ["yes", "no"]}, "yes!", "Yes"),
    ("validate_highlighted_sections", {"N": 2}, "*a* *b*", "*a* b*"),
    ("validate_sections", {"N": 2, "section_splitter": "Part"}, "PART 1 a part 2", "Part a Part 1"),
    ("validate_json_format", {}, '{"a": 1}', '```json\n{"a": 1}\n```'),
    ("validate_repeat_prompt", {"original_prompt": "Why?"}, "Why? So", "why? So"),
    ("validate_two_responses", {}, "a ****** b", "a ****** a"),
    ("validate_uppercase", {}, "A 1!", "Ab"),
    ("validate_lowercase", {}, "a 1!", "aB"),
    ("validate_frequency_capital_words", {"N": 1, "quantifier": "at most"}, "NO a", "NO A"),
    ("validate_end", {"end_phrase": "The end."}, "So. The end.\n", "The end. So"),
    ("validate_quotation", {}, '"a"', '"a'),
    ("validate_no_commas", {}, "a b", "a, b"),
]


@pytest.mark.parametrize(("name", "keywords", "follows", "breaks"), OPEN_INSTRUCT_CASES)
def test_each_constraint_of_open_instruct(sample, name, keywords, follows, breaks):
    nulls = {"N": None, "quantifier": None, "language": None, "original_prompt": None}
    label = json.dumps({**nulls, "func_name": name, **keywords})  # a text with every keyword
    assert ifeval(sample(follows, label))["correct"], follows
    assert not ifeval(sample(breaks, [label]))["correct"], breaks
    assert not ifeval(sample(" ", label))["correct"]

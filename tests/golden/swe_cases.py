"""Logs of test runs as each runner prints them, and random mixes of their lines. Data alone, which the environment of
another package can import too (``swe_answers.py``)."""

from __future__ import annotations

import hashlib

NAMES = (
    "test_one",
    "adds two numbers",
    "a/b.py::test_one",
    "a/b.py::TestA::test_p[x y]",
    "a/b.py::test_p[l - r]",
    "a/b.py::test_p[x",
    "TestAdd/sub_case",
    "mod::tests::it_works",
    "Suite > case (fast)",
    "Über alles (5 ms)",
    "[1]",
    "Foo::Bar#test_a",
    "x = y. z",
    "in src/a.ts",
    "a  b",
    "test_m (m.C)",
    "100%",
    "ends.",
    "PASSED",
    "12ms 3",
    "a/b.py::test_path[/usr/bin/x]",
    "a: b",
    "x - passed",
    "Suite(Linux x86_64) y",
    "Error",
    "a/b.py::test_é[ü]",
)
NOISE = (
    "",
    "   ",
    "running tests",
    "Error: no",
    "    at f (a.js:1:2)",
    "  deeper",
    "    deepest",
    "5 passing (3s)",
    "ok",
    "1 failing",
    "Test Suites: 1 failed, 2 total",
    "SUMMARY:",
    "+ : '>>>>> mark'",
    "(12 ms)",
    "Starting browser Chrome",
    "BUILD SUCCESS",
    "[INFO] BUILD FAILURE",
    "\tx",
)
PYTEST = (
    "PASSED {}",
    "FAILED {} - assert 1 == 2",
    "FAILED {}",
    "ERROR {} - a - b",
    "XFAIL {} - some day",
    "XPASS {}",
    "SKIPPED {}",
    "SKIPPED [1] a/b.py:7: {}",
    "{} PASSED",
    "{} PASSED [ 10%]",
    "{} FAILED",
    "{} XFAIL",
    "PASSED\t{}",
    "FAILED [ 50%] {}",
)
LINES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("pytest", "pytest_options", "pytest_v2", "matplotlib", "seaborn", "smith", "rebench_v2", "gym_pydantic"),
        PYTEST,
    ),
    "r2e": (
        "PASSED {}",
        "FAILED {} - assert 1 == 2",
        "FAILED {}",
        "ERROR {} - a - b",
        "XFAIL {} - some day",
        "SKIPPED [1] a/b.py:7: {}",
        "PASSED a.py::B::{}",
        "=== 1 failed, 2 passed in 1s ===",
    ),
    "django": (
        "{} ... ok",
        "{} ... FAIL",
        "{} ... ERROR",
        "{} ... skipped 'no'",
        "{} ... OK",
        "FAIL: {} x",
        "ERROR: {} x",
        "{}",
        "{} ... Internal Server Error: /a/",
        "{} ... System check identified no issues (0 silenced)",
    ),
    "sympy": (
        "{} ok",
        "{} F",
        "{} E",
        "{} f",
        "____ {} ____",
        "__ sympy/a.py:test_x __",
        "test_b ok",
        "test_c F",
        "test_d E",
    ),
    "gotest": ("--- PASS: {} (0.01s)", "    --- FAIL: {} (1.00s)", "--- SKIP: {} (0s)", "=== RUN {}", "--- PASS: {}"),
    "cargo": ("test {} ... ok", "test {} ... FAILED", "test {} ... ignored", "  test   a::b   ...   ok", "test {}"),
    "minitest": ("{}. = 0.01 s = .", "{}. = 0.10 s = F", "{} = 1 s = E", "Foo#test_{}. = 0.00 s = S", "{}. x"),
    "cucumber": ("{} ....", "{} ..F", "{} .", "  {} ...F..", "{} F", "Feature: {}"),
    "ruby_unit": ("test: {}: .", "  {}:   .: (0.1)", "{}: F", "{}: Eh", "{}: E", "{}:   O", "test: {}"),
    "rspec_transformed_json": ("{} - passed", "{} - failed", "{} - pending", "{} - passed and more", " - failed"),
    "phpunit": ("{} (Tests\\A)", " ✔ {}", " ✘ {}  [1 ms]", " ↩ {}", "✔{}", "App {} ()", "9 {} (x)"),
    "redis": (
        "[ok]: {} (12 ms)",
        "[err]: {} in tests/a.tcl",
        "[skip]: {}",
        "[ignore]: {}",
        "[ok]: {}",
        "[err]:  in x",
        "[ok] {}",
    ),
    "jq": ("PASS: {}", "FAIL: {}", "  PASS: {}", "PASS:{}", "XFAIL: {}"),
    "doctest": (
        '<doctest><TestCase name="{}"><SubCase name="s"><Expression success="true"/></SubCase></TestCase></doctest>',
        '<doctest>\n<TestCase name="c">\n<SubCase name="a"><SubCase name="b">'
        '<Expression success="false"/></SubCase></SubCase></TestCase></doctest>',
        '<doctest><TestCase name="d">\n<SubCase name="{}"/><SubCase name="z"><Expression success="true"/>'
        '<Expression success="false"/></SubCase>\n'
        "</TestCase></doctest>",
    ),
    "micropython_test": ("pass  {}", "FAIL  {}", "skip {}", "passed {}", "  pass {}"),
    "googletest": (
        "[       OK ] {} (0 ms)",
        "[  FAILED  ] {} (3 ms)",
        "x [ OK ] {} (1) y (2)",
        "[ RUN      ] {}",
        "1: [OK] {}",
    ),
    "maven": (
        "+ mvn test -Dtest={} -q",
        "+ mvnd test -pl a -Dtest=a.B#c",
        "[INFO] BUILD SUCCESS",
        "[INFO] BUILD FAILURE",
        "{}",
    ),
    "ant": ("    [junit] [PASS] {}", "[junit]  [FAIL]  {}", "[junit] [ERR] {}", "[junit] {}"),
    "gradle_custom": ("{} PASSED", "{} > t() FAILED", "a.B > t", "PASSED", "FAILED", "> {} PASSED", "w: {}"),
    "jest": ("  ✓ {} (12 ms)", "    ✕ {}", "  ○ {}", "  ✓ {} (1 s)", "  ● {}", "✓{}", "✓  (5 ms)"),
    "jest_json": ("[PASSED] {}", "[FAILED] {}", " [PASSED] {} ", "[SKIPPED] {}", "[PASSED]{}"),
    "vitest": (" ✓ {} 12ms", " × {}", " ↓ {} [skipped]", " ✓ {} 3", " ✓ {}", " ✓ {} 1 ms", "❯ {}", " ✓ a 5 5ms"),
    "karma": (
        "  {}",
        "    {}",
        "      {}",
        "    ✔ {}",
        "      ✖ {}",
        " ✔{}",
        "✔ {}",
        "Starting browser Chrome",
        "SUMMARY:",
    ),
    "tap": ("ok 1 {}", "not ok 12 {}", "ok {}", "  ok 3 - {} # time=1ms", "# {}", "not ok 1"),
    "carbon": (
        "PASS {} (12ms)",
        "PASS {} (1.5 s)",
        "FAIL {} (2s)",
        "FAIL {}",
        "PASS {} (1ms) (2s) x",
        "PASS",
        " PASS {}",
    ),
    "react_pdf": ("PASS {} (12ms)", "PASS {} (1.5 s)", "FAIL {} (2s)", "FAIL {}", "PASS {}"),
    "grommet": ("PASS {} (1.5 s)", "FAIL {} (12ms)", "FAIL {}", "PASS {}", "PASS", "  FAIL {}"),
    "highlightjs": ("  {}", "    ✓ {} (12ms)", "    ✔ {}", "    1) {}", "  2) {} (3ms)", "  3 passing (1s)", "✓ {}"),
    "calypso": (
        "run ./node_modules/.bin/jest --x",
        "  {}",
        "    {}",
        "    ✓ {} (12ms)",
        "      ✕ {}",
        "Test Suites: 1",
    ),
    "chart_js": (
        "Chrome 99.0 (Linux) {} FAILED",
        "Chrome 9 (Linux x86_64) (x) {}FAILED",
        "\x1b[31mChrome 1.2 (Linux) {} FAILED\x1b[39m",
        "Chrome (Linux) {} FAILED",
        "Chrome 1 () {} FAILED",
        "Chrome 1 (L) {} FAILED now",
    ),
    "bpmn_js": (
        "\x1b[2KPhantomJS 2.1.1 (Linux 0.0.0) {} FAILED",
        "2KPhantomJS 2.1.1 (Linux x86_64) {} FAILED",
        "HeadlessChrome 1.0 {} FAILED",
        "Chrome Headless 99 (Linux x86_64) {} FAILED",
        "HeadlessChrome 91.0 (Linux 0.0.0) {} FAILED",
        "Chrome Headless {} FAILED",
    ),
    "openlayers": (
        "Chrome Headless 99.1 (Linux x86_64) {} FAILED",
        "Chrome 99 (Linux 0.0.0) {}FAILED",
        "  1) {}",
        "     AssertionError: x",
        "case {}: mismatch",
        "  case {}: mismatch",
        "  22) {}",
        "Error: {}",
        "case {}: mismatches, case x: mismatch",
    ),
    "eslint": (
        "  1) {}",
        "       {}:",
        "     AssertionError: x",
        "  12) {}\n      it {}",
        "Error",
        "  2) xError",
        "TypeError: {}",
    ),
    "marked": ("1) {}", "22) {} ", " 3) {}", "4){}", "5) "),
}
"""The lines of each parser of SWE-bench's (``parse_log_NAME``), and of other datasets'."""
HEADS = {
    "r2e": "= short test summary info =\n",
    "karma": "Starting browser Chrome\n",
    "calypso": "+ ./node_modules/.bin/jest --x\n",
}
"""How three of four mixes begin, of a parser that reads nothing before it."""
ENDS = {"bpmn_js": "\n", "openlayers": "\n", "chart_js": "\n"}

SAMPLES: dict[str, str] = {
    "gotest": (
        "=== RUN   TestAdd\n"
        "=== RUN   TestAdd/neg\n"
        "--- FAIL: TestAdd (0.01s)\n"
        "    --- PASS: TestAdd/neg (0.00s)\n"
        "    add_test.go:9: got 2\n"
        "--- SKIP: TestNet (0.00s)\n"
        "FAIL\n"
        "FAIL\texample.org/add\t0.014s\n"
    ),
    "cargo": (
        "running 3 tests\n"
        "test tests::adds ... ok\n"
        "test tests::subs ... FAILED\n"
        "test src/lib.rs - add (line 3) ... ok\n"
        "test tests::slow ... ignored\n"
        "\n"
        "test result: FAILED. 1 passed; 1 failed; 1 ignored\n"
    ),
    "phpunit": (
        "PHPUnit 10.5.1\n"
        "\n"
        "Calculator (Tests\\Calculator)\n"
        " ✔ Adds two numbers\n"
        " ✘ Subtracts\n"
        "   │\n"
        "   │ Failed asserting\n"
        " ↩ Divides\n"
        "\n"
        "Time: 00:00.01, Memory: 8.00 MB\n"
    ),
    "jest": (
        " PASS  test/add.test.js\n"
        "  add\n"
        "    ✓ adds (2 ms)\n"
        "    ✕ subtracts (1 ms)\n"
        "    ○ skipped divides\n"
        "\n"
        "  ● add › subtracts\n"
    ),
    "vitest": (
        " ✓ test/add.spec.ts > add > adds 3ms\n"
        " × test/add.spec.ts > add > subtracts\n"
        " ↓ test/add.spec.ts > slow [skipped]\n"
    ),
    "karma": (
        "START:\n"
        "Starting browser Chrome\n"
        "  hooks\n"
        "    useState\n"
        "      ✔ works\n"
        "      ✖ sets\n"
        "    useRef\n"
        "      ✔ keeps\n"
        "  render\n"
        "    ✔ draws\n"
        "\n"
        "SUMMARY:\n"
        "✔ 3 tests completed\n"
    ),
    "tap": (
        "TAP version 13\n1..3\nok 1 adds\nnot ok 2 subtracts\n  ---\n  message: no\nok 3 divides # SKIP\n# tests 3\n"
    ),
    "minitest": (
        "TestSite#test_reads. = 0.01 s = .\nTestSite#test_writes. = 0.20 s = F\nTestSite: a. b = 1 s = E\n\nFinished\n"
    ),
    "maven": (
        "+ mvnd test -B -pl gson -Dtest=GsonTest#testNull\n"
        "[INFO] BUILD SUCCESS\n"
        "+ mvnd test -B -pl gson -Dtest=GsonTest#testOne\n"
        "[ERROR] Tests run: 1\n"
        "[INFO] BUILD FAILURE\n"
    ),
    "gradle_custom": (
        "> Task :core:test\n"
        "org.a.TestB > testOne PASSED\n"
        "org.a.TestB > testTwo\n"
        "WARNING: slow\n"
        "FAILED\n"
        "\n"
        "BUILD FAILED in 3s\n"
    ),
    "googletest": (
        "[==========] Running 2 tests\n"
        "[ RUN      ] format_test.escape\n"
        "[       OK ] format_test.escape (0 ms)\n"
        "2: [  FAILED  ] format_test.join (1 ms)\n"
        "[  PASSED  ] 1 test.\n"
    ),
    "redis": (
        "[ok]: SET and GET an item (2 ms)\n"
        "[err]: DEL all keys in tests/unit/keyspace.tcl\n"
        "[skip]: large (cluster)\n"
        "[1/2 done]: unit/keyspace (3 seconds)\n"
    ),
    "doctest": (
        "+ ./tests\n"
        '<?xml version="1.0"?>\n'
        '<doctest binary="t">\n'
        " <TestSuite>\n"
        '  <TestCase name="json" filename="a.cpp">\n'
        '   <SubCase name="parse"><Expression success="true"/><SubCase name="deep"/></SubCase>\n'
        '   <SubCase name="dump">\n'
        '    <Expression success="false"/></SubCase>\n'
        "  </TestCase>\n"
        " </TestSuite>\n"
        "</doctest>\n"
    ),
    "openlayers": (
        "  1) ol.Map\n"
        "       #render draws\n"
        "         twice:\n"
        "     AssertionError: no\n"
        "\n"
        "Chrome Headless 99.0 (Linux x86_64) ol.Map centers FAILED\n"
        "case cases/a/main.js: mismatch 0.1\n"
    ),
    "eslint": (
        "  3 passing\n"
        "  1 failing\n"
        "\n"
        "  1) RuleTester\n"
        "       valid\n"
        "         a = b:\n"
        "\n"
        "      AssertionError [ERR]: x\n"
        "  2) cli: TypeError: y\n"
    ),
    "django": ("test_a (m.C) ... ok\ntest_b (m.C)\nIt says so. ... FAIL\ntest_c (m.C) ... skipped 'x'\nok\n"),
    "sympy": (
        "sympy/core/tests/test_a.py[3]\ntest_b ok\ntest_c F\ntest_d E                                         [FAIL]\n"
    ),
    "r2e": (
        "x\n"
        "=== short test summary info ===\n"
        "PASSED r2e_tests/test_1.py::test_a\n"
        "FAILED r2e_tests/test_1.py::C::test_b - x - y\n"
        "ERROR r2e_tests/test_1.py::test_c - E\n"
        "XFAIL r2e_tests/test_1.py::test_d\n"
        "SKIPPED [1] r2e_tests/test_1.py:3: no\n"
    ),
    "smith": (
        "tests/test_a.py::test_one PASSED          [ 10%]\n"
        "tests/test_a.py::test_p[a b] FAILED\n"
        "tests/test_a.py::test_x XFAIL (no)  [ 90%]\n"
    ),
}
"""Whole logs, short ones, as the runners print them."""
MIXES = 32


def logs(parser: str) -> list[str]:
    """The logs of a parser: its sample, if there is one, and mixes that depend on its name alone."""
    made = [SAMPLES[parser]] if parser in SAMPLES else []
    for number in range(MIXES):
        drawn = hashlib.sha512(f"{parser} {number}".encode()).digest()
        lines = []
        for line, name in zip(drawn[1 : 4 + drawn[0] % 16], drawn[32:], strict=False):
            source = NOISE if line % 5 == 0 else LINES[parser]
            lines.append(source[line // 5 % len(source)].replace("{}", NAMES[name % len(NAMES)]))
        head = HEADS.get(parser, "") if number % 4 else ""
        made.append(head + "\n".join(lines) + ENDS.get(parser, ""))
    return made

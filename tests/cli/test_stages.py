"""Stages of a verb, on a terminal and elsewhere."""

import io
import sys

import pytest

from gdp.base.terminal import stage
from gdp.cli.show import placing, reporting_stages, stages


class Terminal(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_away_from_a_terminal_a_stage_is_a_line_and_its_progress_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with stages() as say:
        say("loading \x1b[2Jmodel")
        placing(say)(0.5, 0.001)
        say("measuring, round 1", 0.2)
    said = capsys.readouterr()
    assert said.err == "gdp: loading \\x1b[2Jmodel\n"
    assert said.out == ""


def test_a_terminal_shows_a_bar_with_the_stage_and_no_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with stages() as say:
        say("loading [bold]model")
        placing(say)(0.5, 0.0012)
        say("measuring 5 ways to run it, round 2, at most 7 s left", 0.3)
    said = terminal.getvalue()
    assert "measuring 5 ways to run it, round 2, at most 7 s left" in said
    assert "\x1b[" in said
    assert "gdp: " not in said


def test_loading_says_what_it_does_away_from_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with reporting_stages():
        stage("tracing hf:llama")
    assert capsys.readouterr() == ("", "gdp: tracing hf:llama\n")

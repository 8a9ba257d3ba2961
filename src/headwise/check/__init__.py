"""Judges anybody's multi-head attention: binds to it, compares it with the reference, and names the mistake."""

from headwise.check.findings import Finding
from headwise.check.mistakes import MISTAKES, Mistake
from headwise.check.report import Report

__all__ = ["MISTAKES", "Finding", "Mistake", "Report"]

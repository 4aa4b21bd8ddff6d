"""Tests of `repro`: scripts that show a failure without this package."""

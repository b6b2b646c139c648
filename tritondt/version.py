"""The version of the package, which all ranks of a job share."""

VERSION = "0.1.0"

"""Checkpoints of other libraries in and out, and checkpoints of one positional scheme turned into another."""

from bampath.convert.exporter import export_model
from bampath.convert.importer import Imported, import_model
from bampath.convert.surgery import Report, transplant

__all__ = ["Imported", "Report", "export_model", "import_model", "transplant"]

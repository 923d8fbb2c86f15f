"""Volumes that a test opens by itself, without a store."""

from pathlib import Path
from typing import Any

from kvdepot.core.volume import VolumeContext
from kvdepot.io.files import Files
from kvdepot.testing.fakes import CONTEXT
from kvdepot.volumes.log.medium import MountSettings
from kvdepot.volumes.log.volume import LogVolume


def open_log(
    path: Path,
    files: Files,
    *,
    segments: int,
    segment_bytes: int,
    context: VolumeContext = CONTEXT,
    **more: Any,
) -> LogVolume:
    """`more` goes into the MountSettings. `files` stay the caller's."""
    settings = MountSettings(segments * segment_bytes, segment_bytes, **more)
    return LogVolume(path, files, settings, context, [])

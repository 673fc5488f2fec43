"""`dcdm serve` without an argument: the model that comes with the package, and three examples to click."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading

import httpx
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

import dcdm
import tiny
from browser import Page
from dcdm.commands.serve import language_of
from dcdm.data.tokenizers import Tokenizer
from dcdm.decoding.engine import generate
from dcdm.serving.app import create_app_for
from dcdm.serving.served import Served
from dcdm.serving.server import BackgroundServer
from dcdm.serving.settings import Settings
from dcdm.shipped import LANES, card_of
from dcdm.training import settings as run_settings
from dcdm.training.checkpoint_folder import SETTINGS

import json
import subprocess
import sys

import dcdm
from dcdm.cli import main


def test_presets_lists_every_preset_as_a_table_and_as_json(capsys):
    main(["presets", "--json"])
    assert list(json.loads(capsys.readouterr().out)) == dcdm.presets()
    main(["presets"])
    assert "dcdm-moe-2.8b" in capsys.readouterr().out


def test_help_does_not_load_torch_and_wrong_use_exits_with_2():
    code = "import sys; sys.argv = ['dcdm', '--help']\nfrom dcdm.cli import main\ntry: main()\n"
    code += "except SystemExit as e: assert e.code == 0 and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    wrong = subprocess.run([sys.executable, "-m", "dcdm", "fly"], capture_output=True)
    assert wrong.returncode == 2

"""The models of the paper's tables: (a) to (f) of Table 2, and ResM' of Figure 3."""

from __future__ import annotations

from tables.models import Trained

RESM, PKM, RESM_RENEWED = ({"feed_forward": kind} for kind in ("keep", "replace", "renew"))

PLAIN = Trained("plain", "documents")
LONGER = Trained("longer", "documents", start=PLAIN)

MODELS = {
    "(a) BERT": PLAIN,
    "(b) + as many steps": LONGER,
    "(c) + PKM": Trained("pkm", "documents", product_keys=PKM),
    "(d) + ResM": Trained("resm", "documents", product_keys=RESM),
    "(e) + Init + PKM": Trained("init-pkm", "documents", product_keys=PKM, start=PLAIN),
    "(f) + Init + ResM": Trained("init-resm", "documents", product_keys=RESM, start=PLAIN),
}
RENEWED = Trained("init-resm-renewed", "documents", product_keys=RESM_RENEWED, start=PLAIN)

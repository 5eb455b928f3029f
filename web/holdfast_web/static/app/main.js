// What every page does: theme, live parts, forms, dialogs, keys.

import { startAges } from "./ages.js";
import { startCopying } from "./copying.js";
import { startDialogs } from "./dialogs.js";
import { startForms } from "./forms.js";
import { startKeys } from "./keys.js";
import { startSelected } from "./selected.js";
import { startStream } from "./stream.js";
import { startTheme } from "./theme.js";
import { startTrouble } from "./trouble.js";

startTheme();
startAges();
startCopying();
startDialogs();
startForms();
startKeys();
startSelected();
startStream();
startTrouble();

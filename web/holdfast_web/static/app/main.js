// What pages do that change by themselves.

import { startCopying } from "./copying.js";
import { startDialogs } from "./dialogs.js";
import { startFilters } from "./filters.js";
import { startForms } from "./forms.js";
import { startKeys } from "./keys.js";
import { startOrder } from "./order.js";
import { startSelected } from "./selected.js";
import { startStream } from "./stream.js";
import { startTheme } from "./theme.js";
import { startTimes } from "./times.js";
import { startTrouble } from "./trouble.js";

startTheme();
startTimes();
startCopying();
startDialogs();
startFilters();
startForms();
startKeys();
startOrder();
startSelected();
startStream();
startTrouble();

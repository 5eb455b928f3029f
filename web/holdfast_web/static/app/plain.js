// What pages do on which nothing changes by itself.

import { startCopying } from "./copying.js";
import { startDialogs } from "./dialogs.js";
import { startKeys } from "./keys.js";
import { startTheme } from "./theme.js";
import { startTimes } from "./times.js";

startTheme();
startTimes();
startCopying();
startDialogs();
startKeys();

import {byId} from "../shared/dom.js";

byId("chat").textContent = "…";

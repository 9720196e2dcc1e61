export { openDB } from "idb";
export type { IDBPDatabase, DBSchema } from "idb";

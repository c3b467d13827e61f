// Package pgadvlock is a database/sql driver for PostgreSQL that makes
// advisory locks mean what people think they mean.
//
// A session-level advisory lock belongs to one server process, while a Go
// program talks to a pool of connections. So locks survive in idle
// connections, are inherited by the next request as a false success, and are
// "released" on the wrong connection. pgadvlock keeps the pgx driver
// underneath, watches the lock calls on each physical connection, and takes
// back what a connection still holds before it returns to the pool. Adoption
// is a change of configuration:
//
//	db, err := sql.Open("pgadvlock", dsn) // was: sql.Open("pgx", dsn)
//
// Everything that is not a lock statement behaves, and costs, as it does on
// pgx, with two exceptions: [database/sql.Conn.Raw] hands out a *[Conn], whose
// method Conn returns the *pgx.Conn, and a connection lent out that way costs
// one round trip when it comes back.
//
// # Settings
//
// Each setting has three spellings, weakest first: an [Option], an environment
// variable, and a parameter of the DSN.
//
//	option            environment              DSN                      values (default first)
//	WithPreset        PGADVLOCK_PRESET         pgadvlock_preset         enforce, observe, strict
//	WithRule          PGADVLOCK_RULES          pgadvlock_rules          rule:level,... with off, warn, error
//	WithReset         PGADVLOCK_RESET          pgadvlock_reset          unlock_all, discard_all, close, off
//	WithResetWhen     PGADVLOCK_RESET_WHEN     pgadvlock_reset_when     dirty, always
//	WithResetTimeout  PGADVLOCK_RESET_TIMEOUT  pgadvlock_reset_timeout  a duration (2s)
//	WithFunctions     PGADVLOCK_FUNCTIONS      pgadvlock_functions      names, separated by commas
//	WithPoolMode      PGADVLOCK_POOL_MODE      pgadvlock_pool_mode      auto, direct, session, transaction, statement, unknown
//	WithMaxWait       PGADVLOCK_MAX_WAIT       pgadvlock_max_wait       0, or a duration
//	WithDeadPeer      PGADVLOCK_DEAD_PEER      pgadvlock_dead_peer      60s; 0 is off
//	WithBlockerAfter  PGADVLOCK_BLOCKER_AFTER  pgadvlock_blocker_after  1s; 0 is never
//	WithWaitWarning   PGADVLOCK_WAIT_WARNING   pgadvlock_wait_warning   30s; 0 is never
//	WithPoolName      PGADVLOCK_POOL_NAME      pgadvlock_pool_name      a name in metrics (server.address:server.port/db.namespace)
//	WithQueryText     PGADVLOCK_QUERY_TEXT     pgadvlock_query_text     off, on
//	WithKeyArguments  PGADVLOCK_KEY_ARGUMENTS  pgadvlock_key_arguments  off, on
//
// # What is seen
//
// Calls are found in the SQL text, by a lexer that reads it as PostgreSQL does.
// Not seen are calls inside functions, triggers and views on the server,
// dynamic SQL, and a name whose letters of "advisory" are Unicode-escaped; see
// [WithFunctions] and [WithResetWhen] for those.
package pgadvlock

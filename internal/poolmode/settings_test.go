package poolmode

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// How PgBouncer and PostgreSQL can be set up.

// Several PgBouncers can share a port. C and B then often have different ones, and
// share no backend although pools are shared: only silence is left to tell.
func TestTwoPoolersOnOnePort(t *testing.T) {
	s := pgtest.Shared(t)
	b := s.Bouncer(t, "so_reuseport=1")
	s.Bouncer(t, "so_reuseport=1", fmt.Sprintf("listen_port=%d", b.Port()))
	db := s.NewDB(t)
	for _, mode := range []Mode{Session, Transaction, Statement} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			for range max(3, probes(t)/5) {
				mustBe(t, mode, b.DSN(db, mode.String()))
			}
		})
	}
}

// A pool that hands out its backends in turn gives C and B one each, if only they alternate.
func TestRoundRobin(t *testing.T) {
	s := pgtest.Shared(t)
	b := s.Bouncer(t, "server_round_robin=1", "default_pool_size=2")
	dsn := b.DSN(s.NewDB(t), "transaction")
	// Two transactions at once make the pool have two backends.
	one, two := connect(t, dsn), connect(t, dsn)
	for _, sql := range []string{"BEGIN", "COMMIT"} {
		exec(t, one, sql)
		exec(t, two, sql)
	}
	for range 5 {
		if v := mustBe(t, Transaction, dsn); !strings.Contains(v.Evidence, "moved") {
			t.Errorf("the evidence is %q", v.Evidence)
		}
	}
}

// pool_mode can be set for all, for a user (as in every other test), and for a database.
func TestPoolModeOfADatabase(t *testing.T) {
	s := pgtest.Shared(t)
	db := s.NewDB(t)
	// The value of the last setting goes on in lines of its own, with another section.
	b := s.Bouncer(t, "pool_mode=transaction", fmt.Sprintf(
		"verbose=0\n[databases]\nsessions = host=%s port=%d dbname=%s pool_mode=session", s.Host(), s.Port(), db))
	as := func(db string) string { // a user with no mode of its own
		return strings.Replace(b.DSN(db, "session"), "app_sess@", "postgres@", 1)
	}
	mustBe(t, Session, as("sessions"))
	mustBe(t, Transaction, as(db))
}

// What a role or a database may have been given must not lead astray.
func TestServerSettings(t *testing.T) {
	s := pgtest.Shared(t)
	s.RequireBouncer(t)
	for _, tt := range []struct{ name, sql string }{
		{"track_activities", "ALTER ROLE app_tx IN DATABASE %[1]s SET track_activities = off; ALTER ROLE app_sess IN DATABASE %[1]s SET track_activities = off"},
		{"read only", "ALTER DATABASE %s SET default_transaction_read_only = on"},
		{"serializable", "ALTER DATABASE %s SET default_transaction_isolation = 'serializable'"},
		{"impostors", impostors + "; ALTER DATABASE %s SET search_path = hostile, pg_catalog"},
		{"strings", "ALTER DATABASE %s SET standard_conforming_strings = off"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			db := s.NewDB(t)
			sql := tt.sql
			if strings.Contains(sql, "%") {
				sql = fmt.Sprintf(sql, db)
			}
			if err := s.Exec(db, sql); err != nil {
				t.Fatal(err)
			}
			if first := ask(t, connect(t, s.DSN(db))); !first.Direct {
				t.Errorf("the first answer is %+v", first)
			}
			if v := mustBe(t, Transaction, proxy(t, s.DSN(db), renames("PGBOUNCER_"))); !strings.Contains(v.Evidence, "renamed") {
				t.Errorf("the evidence is %q", v.Evidence)
			}
			mustBe(t, Direct, far(t, s.DSN(db), 0))
			mustBe(t, Session, s.BouncerDSN(db, "session"))
			mustBe(t, Transaction, s.BouncerDSN(db, "transaction"))
			mustBe(t, Statement, s.BouncerDSN(db, "statement"))
		})
	}
}

// impostors are functions and an operator that an unqualified name would find first.
const impostors = `CREATE SCHEMA hostile;
CREATE FUNCTION hostile.pg_backend_pid() RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION hostile.inet_client_port() RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION hostile.pg_postmaster_start_time() RETURNS timestamptz LANGUAGE sql AS 'SELECT now()';
CREATE FUNCTION hostile.pg_stat_get_activity(int, out query text, out state text, out backend_start timestamptz) LANGUAGE sql AS 'SELECT ''x'', ''idle'', now()';
CREATE FUNCTION hostile.pg_listening_channels() RETURNS SETOF text LANGUAGE sql AS 'SELECT ''x''';
CREATE FUNCTION hostile.strpos(text, text) RETURNS int LANGUAGE sql AS 'SELECT 0';
CREATE FUNCTION hostile.encode(bytea, text) RETURNS text LANGUAGE sql AS 'SELECT ''x''';
CREATE FUNCTION hostile.no(text, text) RETURNS bool LANGUAGE sql AS 'SELECT false';
CREATE OPERATOR hostile.= (LEFTARG = text, RIGHTARG = text, FUNCTION = hostile.no);
CREATE VIEW hostile.pg_prepared_statements AS SELECT 'PGBOUNCER_1'::text AS name, 'SELECT 1 AS pgadvlock_probe'::text AS statement`

// A backend whose commit has notifications in it holds a lock that every other
// NOTIFY of the cluster waits for, in this test until somebody cancels it: it waits
// for a standby that does not exist.
func TestNotifyLockedAndStandby(t *testing.T) {
	s := pgtest.Private(t, "wal_level=replica", "max_wal_senders=2", "synchronous_standby_names=nobody")
	s.RequireBouncer(t)
	db := s.NewDB(t)
	t.Run("notify locked", func(t *testing.T) {
		holder := connect(t, s.DSN(db))
		pid := exec(t, holder, "SELECT pg_backend_pid()")[0][0]
		exec(t, holder, "CREATE TABLE t(a int)")
		exec(t, holder, "SET synchronous_commit = on")
		done := make(chan error)
		go func() {
			_, err := holder.Exec(t.Context(), "BEGIN; INSERT INTO t VALUES (1); NOTIFY anything; COMMIT").ReadAll()
			done <- err
		}()
		o := pgtest.Observe(t, s.DSN(db))
		defer func() {
			o.Exec("SELECT pg_terminate_backend(" + pid + ")")
			<-done
		}()
		pgtest.Eventually(t, 5*time.Second, "the commit waits for the standby", func() bool {
			var waits bool
			err := o.Conn().QueryRow(t.Context(), "SELECT coalesce(wait_event = 'SyncRep', false) FROM pg_stat_activity WHERE pid = "+pid).Scan(&waits)
			return err == nil && waits
		})
		v := mustBe(t, Unknown, s.BouncerDSN(db, "session"))
		if !strings.Contains(v.Evidence, "NOTIFY waits for a lock") {
			t.Errorf("the evidence is %q", v.Evidence)
		}
		pgtest.Eventually(t, 5*time.Second, "nobody waits for the lock any more", func() bool {
			var n int
			err := o.Conn().QueryRow(t.Context(), "SELECT count(*) FROM pg_locks WHERE NOT granted").Scan(&n)
			return err == nil && n == 0
		})
		mustBe(t, Transaction, s.BouncerDSN(db, "transaction"))
		mustBe(t, Direct, far(t, s.DSN(db), 0))
	})
	t.Run("standby", func(t *testing.T) {
		// Without a primary to follow it replays what there is, and stays a standby. The
		// server writes the file, so that it is the server's.
		c := connect(t, s.DSN(db))
		exec(t, c, "COPY (SELECT) TO '"+exec(t, c, "SHOW data_directory")[0][0]+"/standby.signal'")
		if err := s.Restart(); err != nil {
			t.Fatal(err)
		}
		v := mustBe(t, Unknown, s.BouncerDSN(db, "session"))
		if !strings.Contains(v.Evidence, "LISTEN is refused on a standby") {
			t.Errorf("the evidence is %q", v.Evidence)
		}
		mustBe(t, Direct, s.DSN(db))
		mustBe(t, Direct, far(t, s.DSN(db), 0))
		mustBe(t, Transaction, s.BouncerDSN(db, "transaction"))
		mustBe(t, Statement, s.BouncerDSN(db, "statement"))
	})
}

package software

// Tools that migrate a database. They take session locks on a connection of
// their own, so that two of them do not run at once.

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"ariga.io/atlas/sql/migrate"
	atlas "ariga.io/atlas/sql/postgres"
	"ariga.io/atlas/sql/schema"
	golangmigrate "github.com/golang-migrate/migrate/v4"
	"github.com/golang-migrate/migrate/v4/database"
	migratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	migratepq "github.com/golang-migrate/migrate/v4/database/postgres"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// migrateDriver opens golang-migrate's own two drivers for PostgreSQL, both of
// which take any *sql.DB.
var migrateDrivers = map[string]func(*testing.T, place) (database.Driver, error){
	"postgres": func(t *testing.T, p place) (database.Driver, error) {
		return migratepq.WithInstance(p.open(t), &migratepq.Config{})
	},
	"pgx/v5": func(t *testing.T, p place) (database.Driver, error) {
		return migratepgx.WithInstance(p.open(t), &migratepgx.Config{MultiStatementEnabled: true})
	},
}

func golangMigrate(t *testing.T, d database.Driver) *golangmigrate.Migrate {
	t.Helper()
	source, err := iofs.New(fstest.MapFS{
		"1_users.up.sql":   {Data: []byte("CREATE TABLE users (id int); CREATE INDEX ON users (id);")},
		"1_users.down.sql": {Data: []byte("DROP TABLE users;")},
		"2_fill.up.sql":    {Data: []byte("INSERT INTO users SELECT generate_series(1, 10); SELECT pg_sleep(0.05);")},
		"2_fill.down.sql":  {Data: []byte("DELETE FROM users;")},
	}, ".")
	must(t, err)
	m, err := golangmigrate.NewWithInstance("iofs", source, "pgadvlock", d)
	must(t, err)
	return m
}

func closeMigrate(t *testing.T, m *golangmigrate.Migrate) {
	t.Helper()
	sourceErr, databaseErr := m.Close()
	must(t, sourceErr)
	must(t, databaseErr)
}

func TestGolangMigrate(t *testing.T) {
	for name, open := range migrateDrivers {
		t.Run(name, func(t *testing.T) {
			everywhere(t, func(t *testing.T, p place) {
				// Three at once: one migrates, the others wait for it.
				var wg sync.WaitGroup
				for range 3 {
					d, err := open(t, p)
					must(t, err)
					m := golangMigrate(t, d)
					wg.Go(func() {
						if err := m.Up(); err != nil && !errors.Is(err, golangmigrate.ErrNoChange) {
							t.Error(err)
						}
						closeMigrate(t, m)
					})
				}
				wg.Wait()
				d, err := open(t, p)
				must(t, err)
				m := golangMigrate(t, d)
				version, dirty, err := m.Version()
				must(t, err)
				if version != 2 || dirty {
					t.Errorf("version %d, dirty %t", version, dirty)
				}
				must(t, m.Down())
				must(t, m.Drop())
				closeMigrate(t, m)
				silent(t)
			})
		})
	}
}

// The lock's key is made of names that changed in between: it is unlocked with
// another key than it was locked with.
func TestIssue_golangMigrate130(t *testing.T) {
	p := here(t)
	config := &migratepgx.Config{}
	d, err := migratepgx.WithInstance(p.open(t), config)
	must(t, err)
	must(t, d.Lock())
	held := p.see.Locks()
	if len(held) != 1 {
		t.Fatalf("held %v", held)
	}
	config.DatabaseName = "another"
	must(t, d.Unlock()) // golang-migrate does not look at the answer
	entries := log.take()
	if len(entries) != 1 || entries[0].rule != string(pgadvlock.RuleUnlockNotHeld) || !strings.Contains(entries[0].message, "it holds exclusive session lock") ||
		!strings.Contains(entries[0].message, "migrations_test.go") {
		t.Errorf("reported %+v", entries)
	}
	must(t, d.Close())
	p.nothingHeld(t)
}

// Behind transaction pooling the lock cannot hold; golang-migrate used to wait
// fifteen seconds for one that nobody can see.
func TestIssue_golangMigrate1001_992_908(t *testing.T) {
	for name, open := range migrateDrivers {
		t.Run(name, func(t *testing.T) {
			p := behindTransactions(t)
			began := time.Now()
			_, err := open(t, p) // makes its table under the lock
			// golang-migrate's errors show what they wrap only as text.
			if err == nil || !strings.Contains(err.Error(), "pool mode transaction") || !strings.Contains(err.Error(), "pg_advisory_xact_lock") {
				t.Errorf("opened: %v", err)
			}
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("refused after %s", took)
			}
			p.nothingHeld(t)
		})
	}
}

// golang-migrate gives up waiting, but its connection goes on and gets the lock
// later.
func TestIssue_golangMigrate269(t *testing.T) {
	p := here(t)
	d, err := migratepgx.WithInstance(p.open(t), &migratepgx.Config{})
	must(t, err)
	// Somebody else migrates.
	other, err := migratepgx.WithInstance(p.open(t), &migratepgx.Config{})
	must(t, err)
	must(t, other.Lock())
	m := golangMigrate(t, d)
	m.LockTimeout = 50 * time.Millisecond
	if err := m.Up(); !errors.Is(err, golangmigrate.ErrLockTimeout) {
		t.Errorf("Up: %v", err)
	}
	must(t, other.Unlock())
	p.see.WaitFor(5*time.Second, "it is granted to the one that gave up", func(l []pgtest.Lock) bool { return len(l) == 1 && l[0].Granted })
	silent(t)
	closeMigrate(t, m)
	p.nothingHeld(t)
	if got := rules(log.take()); len(got) != 1 || got[0] != string(pgadvlock.RuleLeakedSessionLock) {
		t.Errorf("reported %v", got)
	}
	must(t, other.Close())
}

// A lock on a connection that is kept is no leak, however many instances keep
// one.
func TestIssue_lnd11071(t *testing.T) {
	p := here(t)
	pool := p.open(t)
	c, _ := pgadvlock.ConnectorOf(pool)
	for i := range 3 {
		d, err := migratepgx.WithInstance(pool, &migratepgx.Config{MigrationsTable: "m" + string(rune('a'+i))})
		must(t, err)
		must(t, d.Lock())
	}
	silent(t)
	for _, s := range c.Sessions() {
		if len(s.Held) != 1 || !strings.HasSuffix(s.Held[0].Caller.File, "migrations_test.go") {
			t.Errorf("%+v", s)
		}
	}
	if n := len(c.Sessions()); n != 3 {
		t.Errorf("%d sessions", n)
	}
	must(t, pool.Close())
}

func gooseProvider(t *testing.T, p place, opts ...lock.SessionLockerOption) *goose.Provider {
	t.Helper()
	locker, err := lock.NewPostgresSessionLocker(opts...)
	must(t, err)
	provider, err := goose.NewProvider(goose.DialectPostgres, p.open(t), fstest.MapFS{
		"00001_users.sql": {Data: []byte("-- +goose Up\nCREATE TABLE users (id int);\n-- +goose Down\nDROP TABLE users;\n")},
		"00002_index.sql": {Data: []byte("-- +goose NO TRANSACTION\n-- +goose Up\nCREATE INDEX CONCURRENTLY i ON users (id);\n-- +goose Down\nDROP INDEX i;\n")},
		"00003_fill.sql":  {Data: []byte("-- +goose Up\n-- +goose StatementBegin\nDO $$ BEGIN INSERT INTO users VALUES (1); END $$;\n-- +goose StatementEnd\n")},
	}, goose.WithSessionLocker(locker))
	must(t, err)
	return provider
}

func TestGoose(t *testing.T) {
	everywhere(t, func(t *testing.T, p place) {
		var wg sync.WaitGroup
		applied := make([]int, 3)
		for i := range applied {
			provider := gooseProvider(t, p, lock.WithLockTimeout(1, 60))
			wg.Go(func() {
				results, err := provider.Up(t.Context())
				if err != nil {
					t.Error(err)
				}
				applied[i] = len(results)
			})
		}
		wg.Wait()
		if applied[0]+applied[1]+applied[2] != 3 {
			t.Errorf("applied %v", applied)
		}
		provider := gooseProvider(t, p)
		_, err := provider.DownTo(t.Context(), 0)
		must(t, err)
		must(t, provider.Close())
		silent(t)
	})
}

// Through *sql.DB, as some tools did, the lock would guard nothing. goose's
// session locker behind transaction pooling is refused as well.
func TestIssue_goose191(t *testing.T) {
	p := here(t)
	db := p.open(t)
	p.refused(t, pgadvlock.RulePooledSessionLock, func() error {
		_, err := db.ExecContext(t.Context(), "SELECT pg_advisory_lock($1)", lock.DefaultLockID)
		return err
	})
	provider := gooseProvider(t, behindTransactions(t))
	if _, err := provider.Up(t.Context()); !errors.Is(err, pgadvlock.RuleTransactionPooling) {
		t.Errorf("Up: %v", err)
	}
}

func TestAtlas(t *testing.T) {
	everywhere(t, func(t *testing.T, p place) {
		ctx := t.Context()
		drv, err := atlas.Open(p.open(t))
		must(t, err)
		unlock, err := drv.Lock(ctx, "atlas_migrate_execute", time.Second)
		must(t, err)
		other, err := atlas.Open(p.open(t))
		must(t, err)
		if _, err := other.Lock(ctx, "atlas_migrate_execute", 0); !errors.Is(err, schema.ErrLocked) {
			t.Errorf("a second lock: %v", err)
		}
		realm, err := drv.InspectRealm(ctx, nil)
		must(t, err)
		desired := schema.NewRealm(schema.New("public").AddTables(schema.NewTable("users").AddColumns(schema.NewIntColumn("id", "int"))))
		changes, err := drv.RealmDiff(realm, desired)
		must(t, err)
		must(t, drv.ApplyChanges(ctx, changes))
		var _ migrate.Driver = drv
		must(t, unlock())
		p.nothingHeld(t)
		unlock, err = other.Lock(ctx, "atlas_migrate_execute", 0)
		must(t, err)
		must(t, unlock())
		silent(t)
	})
}

func TestAtlasRefused(t *testing.T) {
	p := behindTransactions(t)
	drv, err := atlas.Open(p.open(t))
	must(t, err)
	if _, err := drv.Lock(t.Context(), "atlas_migrate_execute", time.Second); !errors.Is(err, pgadvlock.RuleTransactionPooling) {
		t.Errorf("Lock: %v", err)
	}
}

package software

import (
	"context"
	"testing"

	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"

	"github.com/pgadvlock/pgadvlock"
)

type story struct {
	ID      int64 `bun:",pk,autoincrement"`
	Title   string
	Tags    []string `bun:",array"`
	Details map[string]any
}

func TestBun(t *testing.T) {
	everywhere(t, func(t *testing.T, p place) {
		ctx := t.Context()
		pool := p.open(t)
		db := bun.NewDB(pool, pgdialect.New())
		_, err := db.NewCreateTable().Model((*story)(nil)).Exec(ctx)
		must(t, err)
		one := &story{Title: "one", Tags: []string{"a", "b"}, Details: map[string]any{"x": 1.0}}
		_, err = db.NewInsert().Model(one).Exec(ctx)
		must(t, err)
		var found story
		must(t, db.NewSelect().Model(&found).Where("? = ANY (tags)", "b").Scan(ctx))
		if found.ID != one.ID || len(found.Tags) != 2 || found.Details["x"] != 1.0 {
			t.Errorf("%+v", found)
		}
		must(t, db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
			_, err := tx.NewRaw("SELECT pg_advisory_xact_lock(?)", 42).Exec(ctx)
			if !p.see.Held(42) {
				t.Error("not held in the transaction")
			}
			return err
		}))
		conn, err := db.Conn(ctx)
		must(t, err)
		var got bool
		must(t, conn.NewRaw("SELECT pg_try_advisory_lock(?)", 42).Scan(ctx, &got))
		if !got || !p.see.Held(42) {
			t.Error("not held on the connection")
		}
		_, err = conn.ExecContext(ctx, "SELECT pg_advisory_unlock(?)", 42)
		must(t, err)
		must(t, conn.Close())
		p.nothingHeld(t)
		silent(t)

		p.refused(t, pgadvlock.RulePooledSessionLock, func() error { _, err := db.ExecContext(ctx, "SELECT pg_advisory_lock(?)", 42); return err })
		p.refused(t, pgadvlock.RulePooledSessionLock, func() error { _, err := db.NewRaw("SELECT pg_advisory_lock(?)", 42).Exec(ctx); return err })
		p.refused(t, pgadvlock.RulePooledSessionLock, func() error { return db.NewRaw("SELECT pg_try_advisory_lock(?)", 42).Scan(ctx, &got) })
		p.refused(t, pgadvlock.RulePooledSessionLock, func() error { return db.NewSelect().ColumnExpr("pg_try_advisory_lock(?)", 42).Scan(ctx, &got) })
		p.refused(t, pgadvlock.RulePooledSessionLock, func() error { return db.QueryRowContext(ctx, "SELECT pg_advisory_unlock(?)", 42).Scan(&got) })
		leak(t, p, pool)
	})
}

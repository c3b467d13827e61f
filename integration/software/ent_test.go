package software

import (
	"database/sql/driver"
	"testing"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"entgo.io/ent/dialect/sql/schema"
	"entgo.io/ent/dialect/sql/sqlgraph"
	"entgo.io/ent/schema/field"

	"github.com/pgadvlock/pgadvlock"
)

// What ent generates calls the packages used here; code of its own is not
// generated for the test.
func TestEnt(t *testing.T) {
	everywhere(t, func(t *testing.T, p place) {
		ctx := t.Context()
		pool := p.open(t)
		drv := entsql.OpenDB(dialect.Postgres, pool)
		users := schema.NewTable("users").
			AddPrimary(&schema.Column{Name: "id", Type: field.TypeInt64, Increment: true}).
			AddColumn(&schema.Column{Name: "name", Type: field.TypeString, Unique: true}).
			AddColumn(&schema.Column{Name: "tags", Type: field.TypeJSON, Nullable: true})
		for range 2 { // the second finds nothing to do
			migrate, err := schema.NewMigrate(drv)
			must(t, err)
			must(t, migrate.Create(ctx, users))
		}
		spec := sqlgraph.NewCreateSpec("users", sqlgraph.NewFieldSpec("id", field.TypeInt64))
		spec.SetField("name", field.TypeString, driver.Value("a8m"))
		must(t, sqlgraph.CreateNode(ctx, drv, spec))
		if id, ok := spec.ID.Value.(int64); !ok || id == 0 {
			t.Errorf("id %v", spec.ID.Value)
		}
		if err := sqlgraph.CreateNode(ctx, drv, spec); !sqlgraph.IsUniqueConstraintError(err) {
			t.Errorf("the server's error is not recognised: %v", err)
		}
		tx, err := drv.Tx(ctx)
		must(t, err)
		must(t, tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", []any{42}, nil))
		if !p.see.Held(42) {
			t.Error("not held in the transaction")
		}
		must(t, tx.Commit())
		silent(t)
		p.refused(t, pgadvlock.RulePooledSessionLock, func() error { return drv.Exec(ctx, "SELECT pg_advisory_lock($1)", []any{42}, nil) })
		p.refused(t, pgadvlock.RulePooledSessionLock, func() error { return drv.Query(ctx, "SELECT pg_advisory_lock($1)", []any{42}, &entsql.Rows{}) })
		leak(t, p, pool)
	})
}

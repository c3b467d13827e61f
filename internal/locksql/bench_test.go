package locksql

import (
	"fmt"
	"strings"
	"testing"
)

// ormText is SQL as an ORM writes it, n bytes, with no lock call in it.
func ormText(n int) string {
	const row = `SELECT "orders"."id", "orders"."customer_id", "orders"."total_value", "orders"."created_at" FROM "orders" ` +
		`INNER JOIN "invoices" ON "invoices"."order_id" = "orders"."id" WHERE "orders"."deleted_at" IS NULL AND ` +
		`"orders"."status" IN ($1, $2, $3) AND "invoices"."vat_rate" >= $4 ORDER BY "orders"."created_at" DESC LIMIT 50 `
	return strings.Repeat(row, n/len(row)+1)[:n]
}

func BenchmarkMentions(b *testing.B) {
	texts := []struct{ name, text string }{
		{"60B", "SELECT id, name, email FROM users WHERE id = $1 AND org = $2"},
		{"1KB", ormText(1 << 10)},
		{"100KB", ormText(100 << 10)},
		{"10MB", ormText(10 << 20)},
		{"worst/advisor", strings.Repeat("advisor", 100<<10/7)},
		{"worst/v", strings.Repeat("v", 100<<10)},
		{"worst/vi", strings.Repeat("vi", 50<<10)},
		{"worst/values", strings.Repeat("VALUES ", 100<<10/7)},
	}
	for _, functions := range [][]string{nil, {"app.take_lock"}} {
		r := New(functions)
		for _, t := range texts {
			b.Run(fmt.Sprintf("functions=%d/%s", len(functions), t.name), func(b *testing.B) {
				b.SetBytes(int64(len(t.text)))
				b.ReportAllocs()
				for b.Loop() {
					if r.Mentions(t.text) {
						b.Fatal("found")
					}
				}
			})
		}
	}
}

// BenchmarkParse: a plain statement that is remembered, one that is new, and texts without a call while a connection
// holds something.
func BenchmarkParse(b *testing.B) {
	r := New(nil)
	for _, t := range []struct{ name, text string }{
		{"number", "SELECT pg_advisory_lock(42)"},
		{"param", "SELECT pg_try_advisory_lock($1)"},
		{"pair", "SELECT pg_advisory_xact_lock($1, $2)"},
		{"hashtext", "SELECT pg_advisory_xact_lock(hashtext($1))"},
		{"opaque", "SELECT id FROM jobs WHERE pg_try_advisory_lock(7, id) ORDER BY id LIMIT 1"},
	} {
		b.Run("hit/"+t.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				r.Parse(t.text, true)
			}
		})
		b.Run("cold/"+t.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				r.parse(t.text, true)
			}
		})
	}
	for _, t := range []struct{ name, text string }{
		{"select", "SELECT id, name, email FROM users WHERE id = $1 AND org = $2"},
		{"1KB", ormText(1 << 10)},
		{"commit", "COMMIT"},
		{"several/1KB", "SELECT 1; " + ormText(1<<10) + `"`},
	} {
		b.Run("steps/"+t.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				r.Parse(t.text, true)
			}
		})
	}
}

func BenchmarkKey(b *testing.B) {
	r := New(nil)
	for _, args := range []string{"42", "$1", "$1, $1", "hashtext($2)"} {
		c := &r.Parse("SELECT pg_advisory_lock("+args+")", true).Calls[0]
		b.Run(args, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				c.Key(testArg)
			}
		})
	}
}

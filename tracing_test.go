package pgadvlock_test

import (
	"fmt"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// Without an SDK a lock call allocates nothing for telemetry, beyond what
// OpenTelemetry's API does by itself: no allocation of it is made by a line of
// tracing.go or metrics.go.
func TestNoSDKNoAllocations(t *testing.T) {
	b := setUp(t)
	conn := mustConn(t, b.db)
	defer conn.Close()
	ctx := ctxFor(t)
	const calls = 100
	lock := func() {
		for range calls {
			mustExec(t, conn, "SELECT pg_advisory_lock(42)")
			mustExec(t, conn, "SELECT pg_advisory_unlock($1)", 42)
			mustExec(t, conn, "BEGIN")
			mustExec(t, conn, "SELECT pg_try_advisory_xact_lock(4, 2)")
			mustExec(t, conn, "COMMIT")
			mustExec(t, conn, "DO $$ BEGIN PERFORM pg_advisory_xact_lock(1); END $$")
			for _, fails := range []string{"SELECT 1/0", "SELECT pg_advisory_lock(1)", "DO $$ BEGIN PERFORM pg_advisory_lock(1); END $$"} {
				mustExec(t, conn, "BEGIN")
				_, _ = conn.ExecContext(ctx, "SELECT 1/0")
				if _, err := conn.ExecContext(ctx, fails); err == nil {
					t.Fatal("no error")
				}
				mustExec(t, conn, "ROLLBACK")
			}
			if _, err := b.db.ExecContext(ctx, "SELECT pg_advisory_lock(1)"); err == nil {
				t.Fatal("not refused")
			}
		}
	}
	defer func(rate int) { runtime.MemProfileRate = rate }(runtime.MemProfileRate)
	runtime.MemProfileRate = 1
	lock() // what is made once, and the samples of the old rate
	before := allocations()
	lock()
	inTelemetry, inAPI := map[string]int64{}, int64(0)
	for place, n := range allocations() {
		n -= before[place]
		switch owner, site, _ := strings.Cut(place, " "); owner {
		case "telemetry":
			if n >= calls/2 {
				inTelemetry[site] = n
			}
		case "api":
			inAPI += n
		}
	}
	for _, site := range slices.Sorted(maps.Keys(inTelemetry)) {
		t.Errorf("%s: %.1f allocations a call", site, float64(inTelemetry[site])/calls)
	}
	if inAPI < calls {
		t.Errorf("%d allocations by the API: the search would not find any", inAPI)
	}
}

// allocations counts what was allocated so far on behalf of telemetry, by who
// did it: "telemetry tracing.go:17 ..." is our line, "api ..." what stands in for
// an SDK. Attributes and options are made for us, whoever's lines make them.
func allocations() map[string]int64 {
	runtime.GC() // the profile is of the cycle before the last
	runtime.GC()
	n, _ := runtime.MemProfile(nil, true)
	records := make([]runtime.MemProfileRecord, n+1000)
	n, ok := runtime.MemProfile(records, true)
	if !ok {
		panic("more records in the meantime")
	}
	counts := map[string]int64{}
	for _, r := range records[:n] {
		owner := ""
		frames := runtime.CallersFrames(r.Stack())
		for {
			f, more := frames.Next()
			file := filepath.Base(f.File)
			switch {
			case strings.HasPrefix(f.Function, "go.opentelemetry.io/otel/internal/global."):
				owner = "api"
			case strings.HasPrefix(f.Function, "github.com/pgadvlock/pgadvlock.") && (file == "tracing.go" || file == "metrics.go"):
				if owner == "" {
					owner = "telemetry"
				}
				counts[fmt.Sprintf("%s %s:%d in %s", owner, file, f.Line, f.Function)] += r.AllocObjects
				more = false
			}
			if !more {
				break
			}
		}
	}
	return counts
}

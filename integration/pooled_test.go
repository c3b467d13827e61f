package integration

import (
	"bytes"
	"fmt"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// pooled-session-lock is judged by the functions on the stack, which has to
// work however a program was built: with its paths trimmed, its symbols
// stripped, nothing inlined, or more inlined than usual. The program in
// testdata says in comments which of its lines are to be refused.
func TestPooledSessionLockInEveryBuild(t *testing.T) {
	if _, err := osexec.LookPath("go"); err != nil || testing.Short() {
		t.Skip("builds a program four times")
	}
	server := pgtest.Shared(t)
	name := server.NewDB(t)
	see := pgtest.Observe(t, server.DSN(name))
	source, err := os.ReadFile("testdata/pooled/main.go")
	must(t, err)
	want := map[int]int{}
	for i, line := range strings.Split(string(source), "\n") {
		switch {
		case strings.HasSuffix(line, "// refused"):
			want[i+1] = 1
		case strings.HasSuffix(line, "// refused three times"):
			want[i+1] = 3
		}
	}
	if len(want) != 8 {
		t.Fatalf("the source has %d lines that are to be refused", len(want))
	}
	builds := map[string][]string{
		"plain":              nil,
		"trimmed, stripped":  {"-trimpath", "-ldflags=-s -w"},
		"nothing inlined":    {"-gcflags=all=-l"},
		"inlined by profile": {"-pgo=testdata/pooled/cpu.pprof"},
	}
	for build, flags := range builds {
		t.Run(build, func(t *testing.T) {
			program := filepath.Join(t.TempDir(), "pooled.exe")
			if out, err := osexec.Command("go", append(append([]string{"build", "-o", program}, flags...), "./testdata/pooled")...).CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			var stderr bytes.Buffer
			cmd := osexec.CommandContext(t.Context(), program, server.DSN(name))
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("%v\n%s", err, &stderr)
			}
			got := map[int]int{}
			for _, line := range strings.Split(strings.TrimRight(string(out), "\n"), "\n") {
				if line == "" {
					continue
				}
				at, rest, ok := strings.Cut(line, "main.go:")
				var n int
				if _, err := fmt.Sscanf(rest, "%d (main.", &n); err != nil || !ok || strings.HasPrefix(line, "failed") {
					t.Errorf("%q", line)
				}
				if trimmed := !filepath.IsAbs(at); trimmed != strings.Contains(build, "trimmed") {
					t.Errorf("path %q", at)
				}
				got[n]++
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("refused at lines %v, want %v\n%s", got, want, out)
			}
			see.WaitFor(5*time.Second, "nothing is held", func(l []pgtest.Lock) bool { return len(l) == 0 })
		})
	}
}

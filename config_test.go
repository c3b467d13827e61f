package pgadvlock

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

func TestSplitDSN(t *testing.T) {
	for _, c := range []struct {
		dsn, rest string
		params    []param
	}{
		{"", "", nil},
		{"host=h user=u", "host=h user=u", nil},
		{"registeredConnConfig0", "registeredConnConfig0", nil},
		{"postgres://u:p@h/db", "postgres://u:p@h/db", nil},
		{"postgres://u:p@h/db?sslmode=disable", "postgres://u:p@h/db?sslmode=disable", nil},
		{"postgres://h/db?pgadvlock_reset=close", "postgres://h/db", []param{{"reset", "close"}}},
		{"postgresql://h?a=1&pgadvlock_reset=close&b=%20", "postgresql://h?a=1&b=%20", []param{{"reset", "close"}}},
		{"postgres://h?pgadvlock%5Freset=c%6cose&a=1", "postgres://h?a=1", []param{{"reset", "close"}}},
		{"postgres://h?a=1&pgadvlock_rules=unlock-not-held%3Aerror", "postgres://h?a=1", []param{{"rules", "unlock-not-held:error"}}},
		{"postgres://u:a?pgadvlock_reset=x@h/db", "postgres://u:a?pgadvlock_reset=x@h/db", nil},
		{"postgres://[::1?pgadvlock_reset=x]/db?pgadvlock_reset=off", "postgres://[::1?pgadvlock_reset=x]/db", []param{{"reset", "off"}}},
		{"postgres://h/db?application_name=a+b#c&pgadvlock_functions=a%2Bb", "postgres://h/db?application_name=a+b#c", []param{{"functions", "a+b"}}},
		{"host=h pgadvlock_reset=close", "host=h ", []param{{"reset", "close"}}},
		{"pgadvlock_reset=close host=h", "host=h", []param{{"reset", "close"}}},
		{"host=h  pgadvlock_reset = 'clo\\'se'\tuser='a b'", "host=h\tuser='a b'", []param{{"reset", "clo'se"}}},
		{"password='pgadvlock_reset=close' host=h", "password='pgadvlock_reset=close' host=h", nil},
		{`password=a\ pgadvlock_reset=b host=h`, `password=a\ pgadvlock_reset=b host=h`, nil},
		{"host=h pgadvlock_reset=", "host=h", []param{{"reset", ""}}},
		{"host=h pgadvlock_x=1 pgadvlock_y=2 junk", "host=h junk", []param{{"x", "1"}, {"y", "2"}}},
	} {
		rest, params, err := splitDSN(c.dsn)
		if err != nil || strings.TrimSpace(rest) != strings.TrimSpace(c.rest) || !slices.Equal(params, c.params) {
			t.Errorf("splitDSN(%q) = %q, %q, %v; want %q, %q", c.dsn, rest, params, err, c.rest, c.params)
		}
	}
}

// FuzzDSN: what pgx reads from the rest is what it read from the whole, less
// our parameters; no error shows a password.
func FuzzDSN(f *testing.F) {
	for _, s := range []string{
		"host=h user=u password=sEcReT pgadvlock_reset=close", "postgres://u:sEcReT@h:5432/db?pgadvlock_reset=off&sslmode=disable",
		"pgadvlock_reset='", "pgadvlock_=", "host='a\\'b' pgadvlock_rules=a:b", "postgres://?pgadvlock_preset=%zz", "a=b=c", " = ",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, dsn string) {
		rest, params, err := splitDSN(dsn)
		if err != nil {
			return
		}
		whole, wholeErr := pgx.ParseConfig(dsn)
		part, partErr := pgx.ParseConfig(rest)
		if wholeErr != nil {
			return // pgx says what is wrong; ours may have been part of it
		}
		if partErr != nil {
			t.Fatalf("%q: pgx reads it, but not the rest %q: %v", dsn, rest, partErr)
		}
		maps.DeleteFunc(whole.RuntimeParams, func(k, _ string) bool { _, ours := ourParam(k); return ours })
		if !maps.Equal(whole.RuntimeParams, part.RuntimeParams) || whole.Host != part.Host || whole.Password != part.Password || whole.Database != part.Database || whole.User != part.User {
			t.Fatalf("%q: rest %q reads differently (%q)", dsn, rest, params)
		}
	})
}

func TestSettings(t *testing.T) {
	for _, c := range []struct {
		name string
		opts []Option
		env  map[string]string
		dsn  string
		want func(*settings) bool
	}{
		{name: "defaults", want: func(s *settings) bool {
			return s.preset == PresetEnforce && s.reset == ResetUnlockAll && s.resetWhen == ResetDirty && s.resetTimeout == 2*time.Second && s.poolMode == PoolAuto && len(s.rules) == 0 && s.functions == nil
		}},
		{name: "options", opts: []Option{WithReset(ResetClose), WithPoolMode(PoolSession), nil}, want: func(s *settings) bool {
			return s.reset == ResetClose && s.poolMode == PoolSession
		}},
		{name: "environment over options", opts: []Option{WithReset(ResetClose)}, env: map[string]string{"PGADVLOCK_RESET": "off", "PGADVLOCK_PORT": "80"}, want: func(s *settings) bool {
			return s.reset == ResetOff
		}},
		{name: "DSN over environment", env: map[string]string{"PGADVLOCK_RESET": "off", "PGADVLOCK_RESET_TIMEOUT": "1s"}, dsn: "pgadvlock_reset=close", want: func(s *settings) bool {
			return s.reset == ResetClose && s.resetTimeout == time.Second
		}},
		{name: "rules merge by name", opts: []Option{WithRule(RuleUnlockNotHeld, LevelError)}, env: map[string]string{"PGADVLOCK_RULES": "leaked-session-lock:off"}, dsn: "pgadvlock_rules='leaked-session-lock:warn, return-hook-hidden:off'", want: func(s *settings) bool {
			return maps.Equal(s.rules, map[Rule]Level{RuleUnlockNotHeld: LevelError, RuleLeakedSessionLock: LevelWarn, RuleReturnHookHidden: LevelOff})
		}},
		{name: "a preset discards weaker levels", opts: []Option{WithRule(RuleUnlockNotHeld, LevelError)}, env: map[string]string{"PGADVLOCK_RULES": "leaked-session-lock:off", "PGADVLOCK_PRESET": "strict"}, want: func(s *settings) bool {
			return s.preset == PresetStrict && maps.Equal(s.rules, map[Rule]Level{RuleLeakedSessionLock: LevelOff})
		}},
		{name: "pool name", opts: []Option{WithPoolName("options")}, env: map[string]string{"PGADVLOCK_POOL_NAME": "env"}, dsn: "pgadvlock_pool_name=shop/jobs:1", want: func(s *settings) bool {
			return s.poolName == "shop/jobs:1"
		}},
		{name: "functions", dsn: `pgadvlock_functions='take_lock, "My".lock'`, want: func(s *settings) bool {
			return slices.Equal(s.functions, []string{"take_lock", `"My".lock`})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for k, v := range c.env {
				t.Setenv(k, v)
			}
			conn, err := NewConnector(c.dsn, c.opts...)
			if err != nil {
				t.Fatal(err)
			}
			if !c.want(conn.settings) {
				t.Errorf("settings %+v", conn.settings)
			}
		})
	}
}

func TestWrongSettingsAreErrors(t *testing.T) {
	for _, c := range []struct {
		dsn  string
		env  string // a value for PGADVLOCK_RESET
		opts []Option
		want []string
	}{
		{dsn: "host=h password=sEcReT pgadvlock_reset=drop", want: []string{"pgadvlock_reset", `"drop"`, "unlock_all, discard_all, close, off"}},
		{dsn: "postgres://u:sEcReT@h/db?pgadvlock_preset=loud", want: []string{"pgadvlock_preset", `"loud"`, "enforce, observe, strict"}},
		{dsn: "host=h password=sEcReT pgadvlock_rests=off", want: []string{"pgadvlock_rests", "pgadvlock_reset,"}},
		{dsn: "host=h password=sEcReT PGADVLOCK_RESET=off", want: []string{"unknown", "pgadvlock_reset,"}},
		{dsn: "pgadvlock_reset=off pgadvlock_reset=close", want: []string{"pgadvlock_reset", "twice"}},
		{dsn: "pgadvlock_reset='off password=sEcReT", want: []string{"pgadvlock_reset", "unterminated"}},
		{dsn: "postgres://h/db?pgadvlock_reset=off;password=sEcReT", want: []string{"pgadvlock_reset", `"off…"`}},
		{dsn: "postgres://h/db?pgadvlock_reset=%zz", want: []string{"pgadvlock_reset", "%zz"}},
		{dsn: "pgadvlock_rules=unlock-not-held", want: []string{"unlock-not-held", "off, warn, error"}},
		{dsn: "pgadvlock_rules=no-such:warn", want: []string{"no-such", "leaked-session-lock"}},
		{dsn: "pgadvlock_reset_timeout=2", want: []string{"pgadvlock_reset_timeout", `"2"`, "2s"}},
		{dsn: "pgadvlock_reset_timeout=-1s", want: []string{`"-1s"`}},
		{dsn: "pgadvlock_functions=a,,b", want: []string{"pgadvlock_functions", `""`}},
		{dsn: "pgadvlock_pool_mode=pooled", want: []string{"pgadvlock_pool_mode", "transaction"}},
		{dsn: "postgres://h/db?pgadvlock_pool_name=jobs;password=sEcReT", want: []string{"pgadvlock_pool_name", `"jobs…"`}},
		{dsn: "pgadvlock_pool_name='jobs password=sEcReT'", want: []string{"pgadvlock_pool_name", `"jobs…"`}},
		{dsn: "pgadvlock_pool_name=", want: []string{"pgadvlock_pool_name", `""`}},
		{opts: []Option{WithPoolName("jobs password=sEcReT")}, want: []string{"WithPoolName", `"jobs…"`}},
		{env: "drop", want: []string{"environment variable PGADVLOCK_RESET", `"drop"`}},
		{opts: []Option{WithPreset(9)}, want: []string{"WithPreset", "9"}},
		{opts: []Option{WithReset(9)}, want: []string{"WithReset", "9"}},
		{opts: []Option{WithResetWhen(9)}, want: []string{"WithResetWhen"}},
		{opts: []Option{WithResetTimeout(0)}, want: []string{"WithResetTimeout"}},
		{opts: []Option{WithPoolMode(9)}, want: []string{"WithPoolMode"}},
		{opts: []Option{WithRule("no-such", LevelWarn)}, want: []string{"no-such"}},
		{opts: []Option{WithFunctions("")}, want: []string{"WithFunctions"}},
	} {
		t.Run(c.dsn+c.env, func(t *testing.T) {
			if c.env != "" {
				t.Setenv("PGADVLOCK_RESET", c.env)
			}
			_, err := NewConnector(c.dsn, c.opts...)
			if err == nil {
				t.Fatal("no error")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q is missing in: %v", w, err)
				}
			}
			if strings.Contains(err.Error(), "sEcReT") {
				t.Errorf("a password in: %v", err)
			}
		})
	}
}

// What the tables of the documents say is what the code has.
func TestDocumentsListEverything(t *testing.T) {
	read := func(name string) string {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	readme, rules, doc, source := read("README.md"), read("docs/rules.md"), read("doc.go"), read("rules.go")
	telemetry := read("docs/telemetry.md")
	for _, row := range ruleTable {
		// what go doc shows, and what an error says
		if link := "docs/rules.md#" + string(row.rule); !strings.Contains(source, "// See "+link+".\n\tRule") || !strings.Contains((&RuleError{Fix: row.rule.fix()}).Error(), link) {
			t.Errorf("the constant's comment or the error of %s does not lead to docs/rules.md", row.rule)
		}
		line := fmt.Sprintf("| [`%[1]s`](#%[1]s) | %[2]s | %[3]s |", row.rule, row.enforce, row.strict)
		if !strings.Contains(rules, line) || !strings.Contains(rules, "\n## "+string(row.rule)+"\n") {
			t.Errorf("docs/rules.md lacks %q or its section", line)
		}
		if !strings.Contains(readme, "| `"+string(row.rule)+"` |") {
			t.Errorf("README.md lacks %s", row.rule)
		}
	}
	// every attribute, span, span event and metric, and none that there is not
	named := regexp.MustCompile(`"(pgadvlock\.[\w.]+|advisory lock[ a-z]*)"`).FindAllStringSubmatch(read("tracing.go")+read("metrics.go"), -1)
	for _, name := range named {
		if !strings.Contains(telemetry, "`"+name[1]+"`") {
			t.Errorf("docs/telemetry.md lacks %s", name[1])
		}
	}
	for _, name := range regexp.MustCompile("`(pgadvlock\\.[a-z_.]+)[`=]").FindAllStringSubmatch(telemetry, -1) {
		if !slices.ContainsFunc(named, func(n []string) bool { return n[1] == name[1] }) {
			t.Errorf("docs/telemetry.md has %s, which there is not", name[1])
		}
	}
	if len(named) < 25 {
		t.Errorf("only %q", named)
	}
	for _, row := range settingTable {
		dsn, env := "pgadvlock_"+row.name, "PGADVLOCK_"+strings.ToUpper(row.name)
		if !strings.Contains(readme, "| `"+dsn+"` | `"+env+"` |") {
			t.Errorf("README.md lacks %s", dsn)
		}
		if !strings.Contains(doc, dsn) || !strings.Contains(doc, env) {
			t.Errorf("doc.go lacks %s", dsn)
		}
	}
}

package main

// The metrics as Prometheus scrapes them, and the dashboard and the alert rules
// held against what is really exposed.

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/model/textparse"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// series is one line of an exposition.
type series struct {
	labels labels.Labels
	value  float64
}

// scrape reads /metrics.
func scrape(t *testing.T, url string) (all []series) {
	t.Helper()
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %v: %s", resp.Status, err, body)
	}
	p := textparse.NewPromParser(body, labels.NewSymbolTable(), false)
	for {
		entry, err := p.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		if entry == textparse.EntrySeries {
			var s series
			p.Labels(&s.labels)
			_, _, s.value = p.Series()
			all = append(all, s)
		}
	}
}

// sum adds the values of what a selector selects, and says how many those are.
func sum(all []series, matchers ...*labels.Matcher) (sum float64, n int) {
	for _, s := range all {
		if !slices.ContainsFunc(matchers, func(m *labels.Matcher) bool { return !m.Matches(s.labels.Get(m.Name)) }) {
			sum, n = sum+s.value, n+1
		}
	}
	return sum, n
}

// busy is a service in which everything has happened that is counted.
func busy(t *testing.T) (url string) {
	server := pgtest.Shared(t)
	dsn := server.DSN(server.NewDB(t))
	see := pgtest.Observe(t, dsn)
	s, err := newService(dsn, pgadvlock.WithLogger(slog.New(slog.DiscardHandler)),
		pgadvlock.WithBlockerAfter(20*time.Millisecond), pgadvlock.WithWaitWarning(40*time.Millisecond),
		pgadvlock.WithEventHandler(func(_ context.Context, e pgadvlock.Event) {
			if e.Rule == pgadvlock.RuleLongWait {
				panic("a handler's own mistake")
			}
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.db.Close() })
	web := httptest.NewServer(s.handler())
	t.Cleanup(func() {
		web.CloseClientConnections() // ends a request that still waits
		web.Close()
	})
	ctx := t.Context()

	// a refund that waits, long enough to be told who is in its way, and reported
	see.Lock(9527)
	done := make(chan string, 1)
	go func() {
		resp, err := http.Post(web.URL+"/refund/9527", "", nil)
		if err != nil {
			done <- err.Error()
			return
		}
		resp.Body.Close()
		done <- resp.Status
	}()
	pgtest.Eventually(t, 30*time.Second, "the wait is reported", func() bool {
		n, _ := sum(scrape(t, web.URL), named("pgadvlock_events_total"), rule(pgadvlock.RuleLongWait))
		return n == 1
	})
	if n, _ := sum(scrape(t, web.URL), named("pgadvlock_locks_waiting")); n != 1 {
		t.Errorf("%v wait", n)
	}
	see.Unlock(9527)
	if status := <-done; status != "204 No Content" {
		t.Fatal(status)
	}

	// a leak, a refusal, and a lock lost with its connection
	lock := func(key int) *sql.Conn {
		conn, err := s.db.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		if _, err := conn.ExecContext(ctx, "SELECT pg_advisory_lock($1)", key); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	lock(1).Close()
	if _, err := s.db.ExecContext(ctx, "SELECT pg_advisory_lock(2)"); !errors.Is(err, pgadvlock.RulePooledSessionLock) {
		t.Fatal(err)
	}
	lost := lock(3)
	see.Exec("SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND objid = 3")
	if _, err := lost.ExecContext(ctx, "SELECT 1"); err == nil {
		t.Fatal("the connection lives")
	}
	lost.Close()

	lock(4) // and one that is held all the time
	return web.URL
}

func named(name string) *labels.Matcher {
	return labels.MustNewMatcher(labels.MatchEqual, model.MetricNameLabel, name)
}

func rule(r pgadvlock.Rule) *labels.Matcher {
	return labels.MustNewMatcher(labels.MatchEqual, "pgadvlock_rule", string(r))
}

func TestExposition(t *testing.T) {
	all := scrape(t, busy(t))
	for selector, want := range map[string]float64{
		`pgadvlock_wait_duration_seconds_count{pgadvlock_outcome="acquired", pgadvlock_scope="transaction", pgadvlock_lock_mode="exclusive"}`: 1,
		`pgadvlock_wait_duration_seconds_bucket{pgadvlock_scope="transaction", le="300.0"}`:                                                   1,
		`pgadvlock_wait_duration_seconds_bucket{pgadvlock_scope="transaction", le="0.01"}`:                                                    0,
		`pgadvlock_wait_duration_seconds_count{pgadvlock_scope="session"}`:                                                                    3,
		`pgadvlock_hold_duration_seconds_count{pgadvlock_end="transaction_end"}`:                                                              1,
		`pgadvlock_hold_duration_seconds_count{pgadvlock_end="leaked"}`:                                                                       1,
		`pgadvlock_hold_duration_seconds_count{pgadvlock_end="lost"}`:                                                                         1,
		`pgadvlock_events_total{pgadvlock_rule="pooled-session-lock", pgadvlock_level="error"}`:                                               1,
		`pgadvlock_events_total{pgadvlock_rule="leaked-session-lock", pgadvlock_level="warn"}`:                                                1,
		`pgadvlock_events_total{pgadvlock_rule="lost-lock"}`:                                                                                  1,
		`pgadvlock_events_total{pgadvlock_rule="long-wait"}`:                                                                                  1,
		`pgadvlock_resets_total{pgadvlock_reset="unlock_all", pgadvlock_result="ok"}`:                                                         1,
		`pgadvlock_handler_panics_total`:                                                                                                      1,
		`pgadvlock_blocker_lookups_total{pgadvlock_result="ok"}`:                                                                              1,
		`pgadvlock_locks_held{pgadvlock_scope="session", pgadvlock_lock_mode="exclusive"}`:                                                    1,
		`pgadvlock_locks_waiting{db_system_name="postgresql", server_address="127.0.0.1"}`:                                                    0,
	} {
		matchers, err := promQL.ParseMetricSelector(selector)
		if err != nil {
			t.Fatal(err)
		}
		if got, n := sum(all, matchers...); got != want || n == 0 {
			t.Errorf("%s is %v in %d series, want %v", selector, got, n, want)
		}
	}
	if age, _ := sum(all, named("pgadvlock_locks_oldest_seconds")); age <= 0 || age > 60 {
		t.Errorf("the oldest lock is %vs old", age)
	}
	for _, s := range all {
		ours := strings.HasPrefix(s.labels.Get(model.MetricNameLabel), "pgadvlock_")
		pool := fmt.Sprintf("127.0.0.1:%s/%s", s.labels.Get("server_port"), s.labels.Get("db_namespace"))
		if ours && s.labels.Get("db_client_connection_pool_name") != pool {
			t.Errorf("not of the pool %s: %s", pool, s.labels)
		}
		if s.labels.Get("pgadvlock_key") != "" {
			t.Errorf("a key in a label: %s", s.labels)
		}
	}
}

var promQL = parser.NewParser(parser.Options{})

// query is an expression of the dashboard or of an alert rule.
type query struct{ where, expr, legend string }

// dashboardQueries are the panels' queries and the variables', with the
// dashboard's own variables filled in.
func dashboardQueries(t *testing.T) (queries []query) {
	t.Helper()
	text, err := os.ReadFile("dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr, LegendFormat string }
		}
		Templating struct {
			List []struct{ Name, Type, Definition string }
		}
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	variables := []string{"$__rate_interval", "5m", "$__range", "3h"}
	for _, v := range dashboard.Templating.List {
		if v.Type == "query" {
			variables = append(variables, "$"+v.Name, ".*")
			selector, ok := strings.CutPrefix(v.Definition, "label_values(")
			if !ok {
				t.Fatalf("variable %s: %s", v.Name, v.Definition)
			}
			queries = append(queries, query{where: "variable " + v.Name, expr: selector[:strings.LastIndex(selector, ",")]})
		}
	}
	for _, p := range dashboard.Panels {
		if len(p.Targets) == 0 {
			t.Errorf("panel %s is empty", p.Title)
		}
		for _, target := range p.Targets {
			queries = append(queries, query{"panel " + p.Title, target.Expr, target.LegendFormat})
		}
	}
	fill := strings.NewReplacer(variables...)
	for i := range queries {
		queries[i].expr = fill.Replace(queries[i].expr)
		if strings.Contains(queries[i].expr, "$") {
			t.Errorf("%s: a variable that the dashboard does not have: %s", queries[i].where, queries[i].expr)
		}
	}
	return queries
}

func alertRules(t *testing.T) []rulefmt.Rule {
	t.Helper()
	groups, errs := rulefmt.ParseFile("alerts.yaml", false, model.UTF8Validation, promQL, slog.New(slog.DiscardHandler))
	if len(errs) > 0 {
		t.Fatal(errors.Join(errs...))
	}
	return groups.Groups[0].Rules
}

// What the dashboard and the alerts ask for is exposed: each metric, each label
// and each value that they name.
func TestQueriesMeetTheExposition(t *testing.T) {
	all := scrape(t, busy(t))
	queries := dashboardQueries(t)
	for _, r := range alertRules(t) {
		queries = append(queries, query{where: "alert " + r.Alert, expr: r.Expr})
		for _, text := range r.Annotations {
			for _, label := range regexp.MustCompile(`\$labels\.(\w+)`).FindAllStringSubmatch(text, -1) {
				if expr, _ := promQL.ParseExpr(r.Expr); !slices.Contains(grouping(expr), label[1]) {
					t.Errorf("alert %s: its annotations show the label %s, which it does not have", r.Alert, label[1])
				}
			}
		}
	}
	if len(queries) < 20 {
		t.Fatalf("only %d queries", len(queries))
	}
	ours := map[string]bool{}
	for _, s := range all {
		s.labels.Range(func(l labels.Label) { ours[l.Name] = true })
	}
	byPrometheus := []string{"job", "instance"}
	for _, q := range queries {
		expr, err := promQL.ParseExpr(q.expr)
		if err != nil {
			t.Errorf("%s: %v", q.where, err)
			continue
		}
		parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
			if v, ok := node.(*parser.VectorSelector); ok {
				matchers := slices.DeleteFunc(slices.Clone(v.LabelMatchers), func(m *labels.Matcher) bool { return slices.Contains(byPrometheus, m.Name) })
				if _, n := sum(all, matchers...); n == 0 {
					t.Errorf("%s asks for %s, which is not exposed", q.where, v)
				}
			}
			return nil
		})
		for _, label := range regexp.MustCompile(`{{(\w+)}}`).FindAllStringSubmatch(q.legend, -1) {
			if !slices.Contains(grouping(expr), label[1]) {
				t.Errorf("%s: its legend shows the label %s, which it does not have", q.where, label[1])
			}
		}
		for _, label := range grouping(expr) {
			if !ours[label] && !slices.Contains(byPrometheus, label) {
				t.Errorf("%s groups by %s, which no series has", q.where, label)
			}
		}
	}
}

// What the documentation names is exposed.
func TestDocumentedNames(t *testing.T) {
	text, err := os.ReadFile("../../docs/telemetry.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(text), "\n## Prometheus\n")
	if !found {
		t.Fatal("no section Prometheus")
	}
	section, _, _ = strings.Cut(section, "\n## ")
	known := map[string]bool{}
	for _, s := range scrape(t, busy(t)) {
		known[s.labels.Get(model.MetricNameLabel)] = true
		s.labels.Range(func(l labels.Label) { known[l.Name] = true })
	}
	names := regexp.MustCompile(`\bpgadvlock_\w+`).FindAllString(section, -1)
	if len(names) < 10 {
		t.Fatalf("only %q", names)
	}
	for _, name := range names {
		if !known[name] {
			t.Errorf("%s is not exposed", name)
		}
	}
}

// grouping lists the labels that an expression sums by.
func grouping(expr parser.Expr) (names []string) {
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		if a, ok := node.(*parser.AggregateExpr); ok {
			names = append(names, a.Grouping...)
		}
		return nil
	})
	return names
}

// Each alert fires for what it is for, and not otherwise. A sample a minute; _ is
// none.
func TestAlertsFire(t *testing.T) {
	const of = `job="worker", instance="worker-0", db_namespace="shop"`
	event := func(rule, level, values string) string {
		return fmt.Sprintf("pgadvlock_events_total{%s, pgadvlock_rule=%q, pgadvlock_level=%q} %s\n", of, rule, level, values)
	}
	for name, cases := range map[string]map[string]struct {
		load  string
		at    time.Duration
		fires bool
	}{
		"AdvisoryLockWaitTooLong": {
			"first event":     {event("long-wait", "warn", "_x20 1x10"), 22 * time.Minute, true},
			"one more":        {event("long-wait", "warn", "7x20 8x10"), 22 * time.Minute, true},
			"long ago":        {event("long-wait", "warn", "7 8x40"), 30 * time.Minute, false},
			"another rule":    {event("unlock-not-held", "warn", "7x20 8x10"), 22 * time.Minute, false},
			"a first, past":   {event("long-wait", "warn", "_x5 1x40"), 30 * time.Minute, false},
			"after a restart": {event("long-wait", "warn", "7x20 1x10"), 22 * time.Minute, true},
		},
		"AdvisoryLockWaitSlow": {
			"slow": {buckets(of, "0+1x40", "0+1x40", "0+10x40"), 30 * time.Minute, true},
			"fast": {buckets(of, "0+10x40", "0+10x40", "0+10x40"), 30 * time.Minute, false},
		},
		"AdvisoryLockLeaks": {
			"first leak":  {event("leaked-session-lock", "warn", "_x20 1x10"), 22 * time.Minute, true},
			"one more":    {event("leaked-session-lock", "warn", "7x20 8x10"), 22 * time.Minute, true},
			"hidden hook": {event("return-hook-hidden", "warn", "7x20 8x10"), 22 * time.Minute, true},
			"long ago":    {event("leaked-session-lock", "warn", "7 8x60"), 40 * time.Minute, false},
		},
		"AdvisoryLockRefused": {
			"refused":  {event("transaction-pooling", "error", "_x20 1x10"), 22 * time.Minute, true},
			"reported": {event("transaction-pooling", "warn", "_x20 1x10"), 22 * time.Minute, false},
		},
		"AdvisoryLockIdleHolder": {
			"two hours": {"pgadvlock_locks_oldest_seconds{" + of + "} 0+60x120\n", 2 * time.Hour, true},
			"a minute":  {"pgadvlock_locks_oldest_seconds{" + of + "} 60x120\n", 2 * time.Hour, false},
			"one of two pools": {"pgadvlock_locks_oldest_seconds{" + of + `, db_client_connection_pool_name="a"} 0+60x120` + "\n" +
				"pgadvlock_locks_oldest_seconds{" + of + `, db_client_connection_pool_name="a#2"} 0x120` + "\n", 2 * time.Hour, true},
		},
		"AdvisoryLockLost": {
			"first loss": {event("lost-lock", "warn", "_x20 1x10"), 22 * time.Minute, true},
			"none":       {event("lost-lock", "warn", "1x40"), 40 * time.Minute, false},
		},
	} {
		i := slices.IndexFunc(alertRules(t), func(r rulefmt.Rule) bool { return r.Alert == name })
		if i < 0 {
			t.Errorf("no alert %s", name)
			continue
		}
		expr := alertRules(t)[i].Expr
		for what, c := range cases {
			t.Run(name+"/"+what, func(t *testing.T) {
				storage := promqltest.LoadedStorage(t, "load 1m\n"+indent(c.load))
				q, err := promqltest.NewTestEngine(t, false, 0, promqltest.DefaultMaxSamplesPerQuery).
					NewInstantQuery(context.Background(), storage, nil, expr, time.Unix(0, 0).Add(c.at))
				if err != nil {
					t.Fatal(err)
				}
				defer q.Close()
				result := q.Exec(context.Background())
				vector, err := result.Vector()
				if err != nil {
					t.Fatal(err)
				}
				if fires := len(vector) > 0; fires != c.fires {
					t.Errorf("it gives %v", promql.Vector(vector))
				}
			})
		}
	}
	for _, r := range alertRules(t) {
		if r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Errorf("alert %s says too little", r.Alert)
		}
	}
}

// buckets is a histogram with the counts of its buckets 1 s, 5 s and 30 s.
func buckets(of, one, five, thirty string) string {
	bucket := "pgadvlock_wait_duration_seconds_bucket{" + of + ", le=%q} %s\n"
	return fmt.Sprintf(bucket+bucket+bucket+bucket, "1", one, "5", five, "30", thirty, "+Inf", thirty)
}

func indent(text string) string {
	return "  " + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n  ") + "\n"
}

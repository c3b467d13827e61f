package main

// The pods' spans as Jaeger has them, sent over both of OTLP's transports and
// read through both of its query APIs.

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// theJaeger serves all tests. Its watchdog ends it when the test binary ends.
var theJaeger = sync.OnceValues(func() (*jaeger, error) { return startJaeger(context.Background()) })

func requireJaeger(t *testing.T) *jaeger {
	t.Helper()
	j, err := theJaeger()
	if errors.Is(err, errNoJaeger) && os.Getenv("CI") == "" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// seen is a span as one of the APIs shows it, attributes as text, arrays as JSON.
type seen struct {
	trace, id, parent string
	name, kind        string
	instance          string
	duration          time.Duration
	failed            bool
	attrs             map[string]string
	events            []seenEvent
	links             []string // ids
	scope             string
}

type seenEvent struct {
	name  string
	attrs map[string]string
}

func TestPodsInJaeger(t *testing.T) {
	j := requireJaeger(t)
	server := pgtest.Shared(t)
	for _, protocol := range []string{"http/protobuf", "grpc"} {
		t.Run(protocol, func(t *testing.T) {
			db := server.NewDB(t)
			to, service := databaseOn(server, db), "worker on "+db // of its own, since Jaeger is shared
			for name, value := range j.exporterVariables(protocol, service) {
				t.Setenv(name, value)
			}
			began := time.Now()
			if err := runPods(t.Context(), to, podNames...); err != nil {
				t.Fatal(err)
			}
			traces, err := j.await(t.Context(), search(service), complete(to))
			if err != nil {
				t.Fatal(err)
			}
			var text strings.Builder
			render(&text, traces)
			t.Cleanup(func() {
				if t.Failed() {
					t.Logf("the traces:\n%s", text.String())
				}
			})
			t.Run("api", func(t *testing.T) { check(t, to, fromAPI(traces)) })
			t.Run("api v3", func(t *testing.T) {
				check(t, to, j.fromV3(t, "/api/v3/traces?"+url.Values{
					"query.service_name": {service}, "query.num_traces": {"1000"},
					"query.start_time_min": {began.Add(-time.Minute).UTC().Format(time.RFC3339Nano)},
					"query.start_time_max": {time.Now().Add(time.Minute).UTC().Format(time.RFC3339Nano)},
				}.Encode()))
				for _, trace := range traces {
					if n := len(j.fromV3(t, "/api/v3/traces/"+trace.TraceID)); n != len(trace.Spans) {
						t.Errorf("%s: trace %s has %d spans, and %d by its id", trace.root().OperationName, trace.TraceID, len(trace.Spans), n)
					}
				}
			})
			t.Run("by tag", func(t *testing.T) { checkSearches(t, j, to, service) })
			t.Run("rendering", func(t *testing.T) {
				for _, want := range []string{
					"timeout, SQLSTATE 55P03, exclusive transaction lock (1, 9527)", "(worker-0 at 127.0.0.1) has it, exclusive, idle for ",
					"deadlock, SQLSTATE 40P01", "leaked, exclusive session lock 77, taken at pods.go:", "refused, pooled-session-lock",
					"link to advisory lock held of worker-1, trace ", "advisory lock wanted by pid ",
				} {
					if !strings.Contains(text.String(), want) {
						t.Errorf("no %q", want)
					}
				}
			})
		})
	}
}

// checkSearches finds what matters by the driver's attributes.
func checkSearches(t *testing.T, j *jaeger, to database, service string) {
	refused, pooled := []string{"worker-0 job invoice"}, []string(nil)
	if to.pooled != "" {
		pooled = []string{"worker-2 job sync"}
		refused = append(refused, pooled...)
	}
	for tags, want := range map[string][]string{
		"pgadvlock.outcome=timeout":                              {"worker-2 job refund"},
		"pgadvlock.outcome=refused":                              refused,
		"pgadvlock.pool_mode=transaction":                        pooled,
		"pgadvlock.rule=pooled-session-lock":                     {"worker-0 job invoice"},
		"pgadvlock.end=leaked":                                   {"worker-2 job import"},
		"db.response.status_code=40P01":                          {"job transfer"},
		"pgadvlock.outcome=not_acquired":                         {"job nightly-report", "job nightly-report"},
		"pgadvlock.key=(1, 9527) pgadvlock.outcome=acquired":     {"worker-0 job rebuild", "worker-1 job refund"},
		"pgadvlock.key=4711 pgadvlock.scope=transaction":         {"worker-1 job pay", "worker-1 job pay"},
		"pgadvlock.key=99":                                       nil,
		"pgadvlock.outcome=acquired pgadvlock.outcome_of=nobody": nil,
	} {
		found, err := j.find(t.Context(), search(service, strings.Split(strings.ReplaceAll(tags, " pgadvlock", "\npgadvlock"), "\n")...))
		if err != nil {
			t.Error(err)
			continue
		}
		var got []string
		for _, trace := range found {
			got = append(got, trace.instance(trace.root())+" "+trace.root().OperationName)
		}
		slices.Sort(got)
		if !slices.EqualFunc(got, want, strings.HasSuffix) {
			t.Errorf("%s finds %q, want %q", tags, got, want)
		}
	}
}

// check is what each API has to show.
func check(t *testing.T, to database, spans []seen) {
	for _, s := range spans {
		if s.attrs["pgadvlock.outcome"] != "" && (s.kind != "client" || s.attrs["db.system.name"] != "postgresql" || s.attrs["server.address"] != "127.0.0.1") {
			t.Errorf("no span of a database client: %+v", s)
		}
		if strings.HasPrefix(s.name, "job ") != (s.parent == "") || strings.HasPrefix(s.name, "job ") != (s.scope == "worker") {
			t.Errorf("%s has the parent %q and the scope %q", s.name, s.parent, s.scope)
		}
	}

	// A wait for another pod says who held the lock, and for how long it waited.
	rebuilt := only(t, spans, "worker-0", "job rebuild", "advisory lock held", nil)
	refund := only(t, spans, "worker-1", "job refund", "pg_advisory_lock", map[string]string{"pgadvlock.outcome": "acquired",
		"pgadvlock.key": "(1, 9527)", "pgadvlock.key_space": "int,int", "pgadvlock.lock_mode": "exclusive", "pgadvlock.scope": "session", "pgadvlock.blocking": "true"})
	waitedAs(t, spans, refund, time.Second)
	blockedBy(t, refund, rebuilt, "idle")
	if refund.failed || len(refund.links) > 0 {
		t.Errorf("links across Connectors, or an error: %+v", refund)
	}
	timeout := only(t, spans, "worker-2", "job refund", "pg_advisory_xact_lock", map[string]string{"pgadvlock.outcome": "timeout",
		"error.type": "55P03", "db.response.status_code": "55P03", "pgadvlock.scope": "transaction"})
	waitedAs(t, spans, timeout, 900*time.Millisecond)
	blockedBy(t, timeout, rebuilt, "idle")
	if !timeout.failed || !parent(t, spans, timeout).failed {
		t.Errorf("no error: %+v", timeout)
	}

	// A wait for the same pod is linked to what it waits for, in another trace,
	// which has heard of it.
	var blocked, free seen
	for _, s := range spans {
		if s.name == "pg_advisory_xact_lock" && parent(t, spans, s).name == "job pay" {
			if len(s.events) > 0 {
				blocked = s
			} else {
				free = s
			}
		}
	}
	held := only(t, inTrace(spans, free.trace), "worker-1", "job pay", "advisory lock held", map[string]string{"pgadvlock.end": "transaction_end", "pgadvlock.key": "4711"})
	waitedAs(t, spans, blocked, 500*time.Millisecond)
	blockedBy(t, blocked, held, "idle in transaction")
	if !slices.Equal(blocked.links, []string{held.id}) || !slices.Equal(held.links, []string{free.id}) {
		t.Errorf("the wait links to %v, the hold %s to %v, its wait is %s", blocked.links, held.id, held.links, free.id)
	}
	if len(held.events) != 1 || held.events[0].name != "advisory lock wanted" || held.events[0].attrs["pgadvlock.waiter.pid"] != blocked.attrs["pgadvlock.backend_pid"] {
		t.Errorf("the hold has the events %+v", held.events)
	}
	if held.duration < 1400*time.Millisecond || held.kind != "internal" || !strings.HasSuffix(held.attrs["code.file.path"], "pods.go") {
		t.Errorf("the hold: %+v", held)
	}

	// Holds say how they ended.
	unlocked := only(t, spans, "worker-1", "job refund", "advisory lock held", map[string]string{"pgadvlock.end": "unlocked"})
	leaked := only(t, spans, "worker-2", "job import", "advisory lock held", map[string]string{"pgadvlock.end": "leaked", "pgadvlock.key": "77"})
	if unlocked.failed || !leaked.failed {
		t.Errorf("an unlock that failed, or a leak that did not: %+v, %+v", unlocked, leaked)
	}
	if len(leaked.events) != 1 || leaked.events[0].name != "pgadvlock leaked-session-lock" || leaked.events[0].attrs["pgadvlock.key"] != "77" {
		t.Errorf("the leak has the events %+v", leaked.events)
	}
	only(t, spans, "worker-1", "job refund", "pg_advisory_unlock", map[string]string{"pgadvlock.outcome": "released", "pgadvlock.blocking": "false"})

	// What a rule refused is an error with the rule's name, and an event of the job.
	refused := only(t, spans, "worker-0", "job invoice", "pg_advisory_lock", map[string]string{"pgadvlock.outcome": "refused",
		"pgadvlock.rule": "pooled-session-lock", "error.type": "pooled-session-lock"})
	if told := parent(t, spans, refused).events; len(told) != 1 || told[0].name != "pgadvlock pooled-session-lock" || told[0].attrs["pgadvlock.key"] != "8" {
		t.Errorf("the job was told %+v", told)
	}

	if to.pooled != "" {
		only(t, spans, "worker-2", "job sync", "pg_advisory_lock", map[string]string{"pgadvlock.outcome": "refused",
			"pgadvlock.rule": "transaction-pooling", "pgadvlock.pool_mode": "transaction"})
	}

	// One of the two in the deadlock fails, and the other one gets its lock.
	ends := map[string]seen{}
	for _, s := range spans {
		if s.name == "pg_advisory_xact_lock" && parent(t, spans, s).name == "job transfer" && len(s.events) > 0 {
			ends[s.attrs["pgadvlock.outcome"]] = s
		}
	}
	if d, a := ends["deadlock"], ends["acquired"]; len(ends) != 2 || !d.failed || d.attrs["error.type"] != "40P01" || a.failed || d.instance == a.instance {
		t.Errorf("the deadlock ended as %+v", ends)
	}

	// Three pods tried, one did it.
	tries := map[string]int{}
	for _, s := range spans {
		if s.name == "pg_try_advisory_lock" {
			tries[s.attrs["pgadvlock.outcome"]]++
			if s.failed || s.attrs["pgadvlock.key"] != "hashtextextended('…', 0)" {
				t.Errorf("a try: %+v", s)
			}
		}
	}
	if tries["acquired"] != 1 || tries["not_acquired"] != 2 {
		t.Errorf("tries: %v", tries)
	}
}

// only returns the one span of that name under the pod's job.
func only(t *testing.T, spans []seen, instance, job, name string, attrs map[string]string) seen {
	t.Helper()
	var found []seen
	for _, s := range spans {
		if s.instance == instance && s.name == name && parent(t, spans, s).name == job {
			found = append(found, s)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d spans %s in %s of %s", len(found), name, job, instance)
	}
	for key, want := range attrs {
		if got := found[0].attrs[key]; got != want {
			t.Errorf("%s of %s in %s of %s is %q, want %q", key, name, job, instance, got, want)
		}
	}
	return found[0]
}

func inTrace(spans []seen, trace string) (in []seen) {
	for _, s := range spans {
		if s.trace == trace {
			in = append(in, s)
		}
	}
	return in
}

// parent returns the parent of a span, which must be in its trace, or nothing
// for a root.
func parent(t *testing.T, spans []seen, child seen) seen {
	t.Helper()
	if child.parent == "" {
		return seen{}
	}
	for _, s := range spans {
		if s.id == child.parent && s.trace == child.trace {
			return s
		}
	}
	t.Fatalf("the parent of %s is not in its trace", child.name)
	return seen{}
}

// waitedAs compares a wait's duration with what the job measured itself.
func waitedAs(t *testing.T, spans []seen, wait seen, atLeast time.Duration) {
	t.Helper()
	seconds, err := strconv.ParseFloat(parent(t, spans, wait).attrs[string(waited)], 64)
	if err != nil {
		t.Fatal(err)
	}
	measured := time.Duration(seconds * float64(time.Second))
	if off := (wait.duration - measured).Abs(); wait.duration < atLeast || off > measured/5 {
		t.Errorf("%s took %s; the job waited %s, and should have for %s at least", wait.name, wait.duration, measured, atLeast)
	}
}

// blockedBy compares the event of a wait with the hold that it waited for.
func blockedBy(t *testing.T, wait, held seen, state string) {
	t.Helper()
	if len(wait.events) != 1 || wait.events[0].name != "advisory lock blocked" {
		t.Fatalf("%s has the events %+v", wait.name, wait.events)
	}
	for key, want := range map[string]string{
		"pid": "[" + held.attrs["pgadvlock.backend_pid"] + "]", "application_name": `["` + held.instance + `"]`,
		"client_address": `["127.0.0.1"]`, "state": `["` + state + `"]`, "lock_mode": `["exclusive"]`,
	} {
		if got := wait.events[0].attrs["pgadvlock.holder."+key]; got != want {
			t.Errorf("holder %s is %s, want %s", key, got, want)
		}
	}
	var since []time.Time
	if err := json.Unmarshal([]byte(wait.events[0].attrs["pgadvlock.holder.since"]), &since); err != nil || len(since) != 1 || time.Since(since[0]) > time.Minute {
		t.Errorf("holder since %v, %v", since, err)
	}
}

// fromAPI reads what /api/traces shows.
func fromAPI(traces []*traceData) (spans []seen) {
	attrs := func(t tags) map[string]string {
		all := map[string]string{}
		for _, tag := range t {
			all[tag.Key] = t.text(tag.Key)
		}
		return all
	}
	for _, t := range traces {
		for _, s := range t.Spans {
			one := seen{trace: t.TraceID, id: s.SpanID, parent: s.parent(), name: s.OperationName, kind: s.Tags.text("span.kind"),
				instance: t.instance(s), duration: s.duration(), failed: s.Tags.text("error") == "true", attrs: attrs(s.Tags), scope: s.Tags.text("otel.scope.name")}
			for _, e := range s.Logs {
				one.events = append(one.events, seenEvent{e.name(), attrs(e.Fields)})
			}
			for _, l := range s.links() {
				one.links = append(one.links, l.SpanID)
			}
			spans = append(spans, one)
		}
	}
	return spans
}

// otlp is OTLP in JSON, as /api/v3 answers.
type otlp struct {
	Result struct {
		ResourceSpans []struct {
			Resource   struct{ Attributes otlpAttrs }
			ScopeSpans []struct {
				Scope struct{ Name string }
				Spans []struct {
					TraceID, SpanID, ParentSpanID, Name string
					Kind                                int
					StartTimeUnixNano, EndTimeUnixNano  int64 `json:",string"`
					Status                              struct{ Code int }
					Attributes                          otlpAttrs
					Events                              []struct {
						Name       string
						Attributes otlpAttrs
					}
					Links []struct{ SpanID string }
				}
			}
		}
	}
}

type otlpAttrs []struct {
	Key   string
	Value otlpValue
}

type otlpValue struct {
	StringValue *string
	BoolValue   *bool
	IntValue    *string
	DoubleValue *float64
	ArrayValue  *struct{ Values []otlpValue }
}

func (v otlpValue) any() any {
	switch {
	case v.StringValue != nil:
		return *v.StringValue
	case v.BoolValue != nil:
		return *v.BoolValue
	case v.IntValue != nil:
		return json.Number(*v.IntValue)
	case v.DoubleValue != nil:
		return *v.DoubleValue
	case v.ArrayValue != nil:
		var all []any
		for _, one := range v.ArrayValue.Values {
			all = append(all, one.any())
		}
		return all
	}
	return nil
}

func (a otlpAttrs) texts() map[string]string {
	all := map[string]string{}
	for _, attr := range a {
		v := attr.Value.any()
		if list, ok := v.([]any); ok {
			text, _ := json.Marshal(list)
			v = string(text)
		}
		all[attr.Key] = fmt.Sprint(v)
	}
	return all
}

// fromV3 reads an answer of /api/v3.
func (j *jaeger) fromV3(t *testing.T, path string) (spans []seen) {
	t.Helper()
	var answer otlp
	if err := get(t.Context(), j.query+path, &answer); err != nil {
		t.Fatal(err)
	}
	for _, r := range answer.Result.ResourceSpans {
		for _, scope := range r.ScopeSpans {
			for _, s := range scope.Spans {
				one := seen{trace: s.TraceID, id: s.SpanID, parent: s.ParentSpanID, name: s.Name, kind: []string{"", "internal", "server", "client", "", ""}[s.Kind],
					instance: r.Resource.Attributes.texts()["service.instance.id"], duration: time.Duration(s.EndTimeUnixNano - s.StartTimeUnixNano),
					failed: s.Status.Code == 2, attrs: s.Attributes.texts(), scope: scope.Scope.Name}
				for _, e := range s.Events {
					one.events = append(one.events, seenEvent{e.Name, e.Attributes.texts()})
				}
				for _, l := range s.Links {
					one.links = append(one.links, l.SpanID)
				}
				spans = append(spans, one)
			}
		}
	}
	slices.SortFunc(spans, func(a, b seen) int { return cmp.Compare(a.trace+a.id, b.trace+b.id) })
	return spans
}

// A Jaeger that does not come up is told of at once, with what it said.
func TestJaegerThatEndsAtItsStart(t *testing.T) {
	t.Setenv("PGADVLOCK_JAEGER", "/bin/cat")
	t.Setenv("PGADVLOCK_JAEGER_CONFIG", "no such file")
	_, err := startJaeger(t.Context())
	if err == nil || !strings.Contains(err.Error(), "ended at its start:\n") || !strings.Contains(err.Error(), "cat: ") {
		t.Errorf("error %v", err)
	}
}

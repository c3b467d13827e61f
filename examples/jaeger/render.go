package main

// This file owns how traces look in a terminal: a line for each span, with its
// time as a bar, and under it what it has to say.

import (
	"fmt"
	"io"
	"path"
	"strings"
	"time"
)

const barWidth = 28

// render writes the traces. Links are told by name where they lead to one of
// them.
func render(out io.Writer, traces []*traceData) {
	spans := map[string]placed{}
	for _, t := range traces {
		for _, s := range t.Spans {
			spans[s.SpanID] = placed{t, s}
		}
	}
	for _, t := range traces {
		root := t.root()
		fmt.Fprintf(out, "%s  %s  %s\n", t.instance(root), clock(root.StartTime), t.TraceID)
		r := rendering{Writer: out, trace: t, spans: spans}
		r.walk(root, 1, func(s *span, indent string) { r.nameWidth = max(r.nameWidth, len(indent+s.OperationName)) })
		r.walk(root, 1, r.span)
		fmt.Fprintln(out)
	}
}

type rendering struct {
	io.Writer
	trace     *traceData
	spans     map[string]placed // of all traces, by id
	nameWidth int
}

type placed struct {
	trace *traceData
	span  *span
}

// walk calls do for a span and those under it.
func (r rendering) walk(s *span, depth int, do func(s *span, indent string)) {
	do(s, strings.Repeat("  ", depth))
	for _, child := range r.trace.Spans {
		if child.parent() == s.SpanID {
			r.walk(child, depth+1, do)
		}
	}
}

func (r rendering) span(s *span, indent string) {
	line := fmt.Sprintf("%-*s  %s %9s  %s", r.nameWidth, indent+s.OperationName, r.bar(s), short(s.duration()), strings.Join(facts(s), ", "))
	fmt.Fprintln(r, strings.TrimRight(line, " "))
	for _, e := range s.Logs {
		fmt.Fprintf(r, "%s    at %s: %s\n", indent, short(time.Duration(e.Timestamp-s.StartTime)*time.Microsecond), told(e))
	}
	for _, l := range s.links() {
		to, ok := r.spans[l.SpanID]
		switch {
		case !ok:
			fmt.Fprintf(r, "%s    link to span %s of trace %s\n", indent, l.SpanID, l.TraceID)
		case to.trace == r.trace:
			fmt.Fprintf(r, "%s    link to %s\n", indent, to.span.OperationName)
		default:
			fmt.Fprintf(r, "%s    link to %s of %s, trace %.8s\n", indent, to.span.OperationName, to.trace.instance(to.span), l.TraceID)
		}
	}
}

// bar shows when, within its trace, a span was.
func (r rendering) bar(s *span) string {
	first, last := s.StartTime, s.StartTime
	for _, s := range r.trace.Spans {
		first, last = min(first, s.StartTime), max(last, s.StartTime+s.Duration)
	}
	total := max(last-first, 1)
	from := min(int((s.StartTime-first)*barWidth/total), barWidth-1)
	to := max(int(((s.StartTime+s.Duration-first)*barWidth+total-1)/total), from+1) // rounded up
	return strings.Repeat("·", from) + strings.Repeat("█", to-from) + strings.Repeat("·", barWidth-to)
}

// facts are what a span says of a lock, the most important first.
func facts(s *span) (facts []string) {
	t := s.Tags
	for _, key := range []string{"pgadvlock.outcome", "pgadvlock.end", "pgadvlock.rule"} {
		if v := t.text(key); v != "" {
			facts = append(facts, v)
		}
	}
	if v := t.text("db.response.status_code"); v != "" {
		facts = append(facts, "SQLSTATE "+v)
	}
	if v := t.text("pgadvlock.key"); v != "" {
		facts = append(facts, strings.TrimSpace(t.text("pgadvlock.lock_mode")+" "+t.text("pgadvlock.scope")+" lock "+v))
	}
	if v := t.text("pgadvlock.reentrant"); v == "true" {
		facts = append(facts, "reentrant")
	}
	if v := t.text("code.file.path"); v != "" {
		facts = append(facts, fmt.Sprintf("taken at %s:%s", path.Base(v), t.text("code.line.number")))
	}
	if v := t.text("otel.status_description"); v != "" && len(facts) == 0 {
		facts = append(facts, "failed: "+ellipsis(v, 90))
	}
	return facts
}

// told says what an event tells.
func told(e event) string {
	f := e.Fields
	var holders []string
	apps, addrs, states, sinces, modes := f.list("pgadvlock.holder.application_name"), f.list("pgadvlock.holder.client_address"),
		f.list("pgadvlock.holder.state"), f.list("pgadvlock.holder.since"), f.list("pgadvlock.holder.lock_mode")
	for i, pid := range f.list("pgadvlock.holder.pid") {
		h := fmt.Sprintf("pid %s (%s", pid, nth(apps, i))
		if a := nth(addrs, i); a != "" {
			h += " at " + a
		}
		h += ") has it, " + nth(modes, i)
		if state := nth(states, i); state != "" {
			h += ", " + state
			if since, err := time.Parse(time.RFC3339Nano, nth(sinces, i)); err == nil {
				h += fmt.Sprintf(" for %s", short(time.UnixMicro(e.Timestamp).Sub(since)))
			}
		}
		holders = append(holders, h)
	}
	if len(holders) > 0 {
		return e.name() + ": " + strings.Join(holders, "; ")
	}
	if pid := f.text("pgadvlock.waiter.pid"); pid != "" {
		return e.name() + " by pid " + pid
	}
	if file := f.text("code.file.path"); file != "" {
		return fmt.Sprintf("%s, lock %s, at %s:%s", e.name(), f.text("pgadvlock.key"), path.Base(file), f.text("code.line.number"))
	}
	return e.name()
}

func nth(list []string, i int) string {
	if i < len(list) {
		return list[i]
	}
	return ""
}

// ellipsis makes a text one line of at most so many characters.
func ellipsis(s string, most int) string {
	s = strings.Join(strings.Fields(s), " ")
	if r := []rune(s); len(r) > most {
		return string(r[:most-1]) + "…"
	}
	return s
}

func clock(micros int64) string { return time.UnixMicro(micros).Format("15:04:05.000") }

// short is a duration to three digits or so.
func short(d time.Duration) string {
	switch {
	case d >= time.Second:
		return d.Round(time.Millisecond).String()
	case d >= time.Millisecond:
		return d.Round(10 * time.Microsecond).String()
	}
	return d.String()
}

package locksql

// Steps: the statements that begin and end transactions, move savepoints, set isolation levels, and manage prepared
// statements. They are read as the grammar has them, but for errors, which the server finds.

// beginsStep reports whether a statement that begins with that word may be a step.
func beginsStep(k string) bool {
	switch k {
	case "abort", "begin", "commit", "create", "deallocate", "discard", "end", "execute", "explain", "prepare", "release",
		"reset", "rollback", "savepoint", "set", "start":
		return true
	}
	return false
}

// step reads the words of a statement that is a step, and notes it.
func (w *walker) step() mode {
	step := Step{}
	switch k := w.word(w.tok); k {
	case "begin", "start":
		step = Step{Kind: StepBegin, Isolation: w.isolation()}
	case "commit", "end", "rollback", "abort":
		w.advance()
		if w.word(w.tok) == "prepared" {
			return executed
		}
		if !w.acceptWord("work") {
			w.acceptWord("transaction")
		}
		switch {
		case k == "rollback" && w.acceptWord("to"):
			step = Step{Kind: StepRollbackTo, Name: w.nameAfter("savepoint")}
		case k == "commit" || k == "end":
			step = Step{Kind: StepCommit, Chain: w.chain()}
		default:
			step = Step{Kind: StepRollback, Chain: w.chain()}
		}
	case "savepoint":
		w.advance()
		step = Step{Kind: StepSavepoint, Name: w.nameAfter("")}
	case "release":
		w.advance()
		step = Step{Kind: StepRelease, Name: w.nameAfter("savepoint")}
	case "prepare":
		w.advance()
		if ahead := w.parser; ahead.acceptWord("transaction") && ahead.tok.kind == tString {
			step.Kind = StepPrepareTransaction
			break
		}
		w.st.Steps = append(w.st.Steps, Step{Kind: StepPrepare, Name: w.nameAfter("")})
		return prepared
	case "execute":
		w.advance()
		step = Step{Kind: StepExecute, Name: w.nameAfter("")}
	case "deallocate":
		w.advance()
		step.Kind = StepDeallocate
		if ahead := w.parser; ahead.acceptWord("prepare") && ahead.named() {
			w.parser = ahead
		}
		if !w.acceptWord("all") {
			step.Name = w.nameAfter("")
		}
	case "discard":
		w.advance()
		if w.word(w.tok) != "all" {
			return executed
		}
		step.Kind = StepDiscardAll
	case "set", "reset":
		var ok bool
		if step, ok = w.set(); !ok {
			return executed
		}
	default:
		return executed
	}
	w.st.Steps = append(w.st.Steps, step)
	return executed
}

// nameAfter reads a name, perhaps after a noise word; alone that word is a name itself.
func (w *walker) nameAfter(noise string) string {
	if ahead := w.parser; noise != "" && ahead.acceptWord(noise) && ahead.named() {
		w.parser = ahead
	}
	if !w.named() {
		return ""
	}
	return w.name(w.advance())
}

// chain reads [AND [NO] CHAIN].
func (w *walker) chain() bool {
	if !w.acceptWord("and") {
		return false
	}
	return !w.acceptWord("no")
}

// isolation reads on through the modes of a transaction and returns its isolation level, if one is among them.
func (w *walker) isolation() (level string) {
	for w.tok.kind == tIdent || w.tok.kind == ',' {
		if !w.acceptWord("level") {
			w.advance()
			continue
		}
		level = lower(w.text(w.advance()))
		if level != "serializable" {
			level += " " + lower(w.text(w.advance()))
		}
	}
	return isolationLevel(level)
}

// isolationLevel is level in lower case if it is one, else "".
func isolationLevel(level string) string {
	for _, l := range [...]string{"read uncommitted", "read committed", "repeatable read", "serializable"} {
		if equalFold(level, l) {
			return l
		}
	}
	return ""
}

// set reads SET or RESET of an isolation level; false: it is something else.
func (w *walker) set() (step Step, ok bool) {
	if w.acceptWord("reset") {
		if w.word(w.tok) == "all" || w.isSetting("default_transaction_isolation") {
			return Step{Kind: StepSetSession}, true
		}
		return step, false
	}
	w.advance()
	local := w.acceptWord("local")
	if ahead := w.parser; ahead.acceptWord("session") && ahead.word(ahead.tok) != "characteristics" {
		w.parser = ahead
	}
	switch {
	case w.acceptWord("session"):
		step = Step{Kind: StepSetSession, Isolation: w.isolation()}
		return step, step.Isolation != ""
	case w.acceptWord("transaction"):
		step = Step{Kind: StepSetTransaction, Isolation: w.isolation()}
		return step, step.Isolation != ""
	case w.isSetting("transaction_isolation"):
		step.Kind = StepSetTransaction
	case w.isSetting("default_transaction_isolation") && !local: // with LOCAL it ends before the next transaction begins
		step.Kind = StepSetSession
	default:
		return step, false
	}
	w.advance()
	w.advance() // TO or =
	switch w.tok.kind {
	case tString:
		s, _ := w.unquote(w.tok)
		step.Isolation = isolationLevel(s)
	case tIdent, tQuoted:
		step.Isolation = isolationLevel(w.name(w.tok))
	}
	return step, true
}

// isSetting reports whether the current token is that setting; quoted, too, their names fold.
func (w *walker) isSetting(setting string) bool {
	return w.named() && equalFold(w.name(w.tok), setting)
}

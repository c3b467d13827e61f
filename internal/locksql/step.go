package locksql

// beginsStep reports whether a statement that begins with that word may be a step.
func beginsStep(k keyword) bool {
	switch k {
	case kwAbort, kwBegin, kwCommit, kwCreate, kwDeallocate, kwDiscard, kwEnd, kwExecute, kwExplain, kwPrepare, kwRelease,
		kwReset, kwRollback, kwSavepoint, kwSet, kwStart:
		return true
	}
	return false
}

// step reads the words of a statement that is a step, and notes it.
func (w *walker) step() mode {
	step := Step{}
	switch k := w.keyword(w.tok); k {
	case kwBegin, kwStart:
		w.advance()
		step = Step{Kind: StepBegin, Isolation: w.isolation()}
	case kwCommit, kwEnd, kwRollback, kwAbort:
		w.advance()
		if w.keyword(w.tok) == kwPrepared {
			return executed
		}
		if !w.acceptWord(kwWork) {
			w.acceptWord(kwTransaction)
		}
		switch {
		case k == kwRollback && w.acceptWord(kwTo):
			step = Step{Kind: StepRollbackTo, Name: w.nameAfter(kwSavepoint)}
		case k == kwCommit || k == kwEnd:
			step = Step{Kind: StepCommit, Chain: w.chain()}
		default:
			step = Step{Kind: StepRollback, Chain: w.chain()}
		}
	case kwSavepoint:
		w.advance()
		step = Step{Kind: StepSavepoint, Name: w.nameAfter(0)}
	case kwRelease:
		w.advance()
		step = Step{Kind: StepRelease, Name: w.nameAfter(kwSavepoint)}
	case kwPrepare:
		w.advance()
		if ahead := w.parser; ahead.acceptWord(kwTransaction) && ahead.tok.kind == tString {
			step.Kind = StepPrepareTransaction
			break
		}
		w.st.Steps = append(w.st.Steps, Step{Kind: StepPrepare, Name: w.nameAfter(0)})
		return prepared
	case kwExecute:
		w.advance()
		step = Step{Kind: StepExecute, Name: w.nameAfter(0)}
	case kwDeallocate:
		w.advance()
		step.Kind = StepDeallocate
		if ahead := w.parser; ahead.acceptWord(kwPrepare) && ahead.named() {
			w.parser = ahead
		}
		if !w.acceptWord(kwAll) {
			step.Name = w.nameAfter(0)
		}
	case kwDiscard:
		w.advance()
		if w.keyword(w.tok) != kwAll {
			return executed
		}
		step.Kind = StepDiscardAll
	case kwSet, kwReset:
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
func (w *walker) nameAfter(noise keyword) string {
	if ahead := w.parser; noise != 0 && ahead.acceptWord(noise) && ahead.named() {
		w.parser = ahead
	}
	if !w.named() {
		return ""
	}
	return w.name(w.advance())
}

// chain reads [AND [NO] CHAIN].
func (w *walker) chain() bool {
	if !w.acceptWord(kwAnd) {
		return false
	}
	return !w.acceptWord(kwNo)
}

// isolation reads the modes of a transaction and returns its isolation level, if one is among them.
func (w *walker) isolation() (level string) {
	for w.tok.kind == tIdent || w.tok.kind == ',' {
		if !w.acceptWord(kwIsolation) || !w.acceptWord(kwLevel) {
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
	if w.acceptWord(kwReset) {
		if w.keyword(w.tok) == kwAll || w.isSetting("default_transaction_isolation") {
			return Step{Kind: StepSetSession}, true
		}
		return step, false
	}
	w.advance()
	local := w.acceptWord(kwLocal)
	if ahead := w.parser; ahead.acceptWord(kwSession) && ahead.keyword(ahead.tok) != kwCharacteristics {
		w.parser = ahead
	}
	switch {
	case w.acceptWord(kwSession):
		step = Step{Kind: StepSetSession, Isolation: w.isolation()}
		return step, step.Isolation != ""
	case w.acceptWord(kwTransaction):
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

package locksql

// keyword is an unquoted word that this package gives a meaning to; 0 is any other word.
type keyword uint8

const (
	kwAbort keyword = iota + 1
	kwAggregate
	kwAll
	kwAlter
	kwAnalyze
	kwAnd
	kwAs
	kwAtomic
	kwBegin
	kwCall
	kwCast
	kwCharacteristics
	kwCollation
	kwComment
	kwCommit
	kwConversion
	kwCopy
	kwCreate
	kwCross
	kwData
	kwDeallocate
	kwDeclare
	kwDefault
	kwDelete
	kwDiscard
	kwDistinct
	kwDo
	kwDrop
	kwEnd
	kwEvent
	kwExcept
	kwExecute
	kwExists
	kwExplain
	kwExtension
	kwFetch
	kwFor
	kwFrom
	kwFunction
	kwGrant
	kwGroup
	kwHaving
	kwInsert
	kwIntersect
	kwInto
	kwIsnull
	kwIsolation
	kwJoin
	kwLanguage
	kwLateral
	kwLevel
	kwLimit
	kwLocal
	kwMaterialized
	kwMerge
	kwNo
	kwNotnull
	kwNull
	kwOffset
	kwOn
	kwOnly
	kwOperator
	kwOr
	kwOrder
	kwPerform
	kwPolicy
	kwPrepare
	kwPrepared
	kwProcedure
	kwRecursive
	kwReferences
	kwRelease
	kwReplace
	kwReset
	kwReturning
	kwRevoke
	kwRollback
	kwRoutine
	kwRows
	kwRule
	kwSavepoint
	kwSecurity
	kwSelect
	kwSession
	kwSet
	kwStart
	kwTable
	kwTo
	kwTransaction
	kwTransform
	kwTrigger
	kwUnion
	kwUpdate
	kwValues
	kwVerbose
	kwView
	kwWhere
	kwWindow
	kwWith
	kwWork
)

var keywords = map[string]keyword{
	"abort": kwAbort, "aggregate": kwAggregate, "all": kwAll, "alter": kwAlter, "analyse": kwAnalyze, "analyze": kwAnalyze,
	"and": kwAnd, "as": kwAs, "atomic": kwAtomic, "begin": kwBegin, "call": kwCall, "cast": kwCast,
	"characteristics": kwCharacteristics, "collation": kwCollation, "comment": kwComment, "commit": kwCommit,
	"conversion": kwConversion, "copy": kwCopy, "create": kwCreate, "cross": kwCross, "data": kwData,
	"deallocate": kwDeallocate, "declare": kwDeclare, "default": kwDefault, "delete": kwDelete, "discard": kwDiscard,
	"distinct": kwDistinct, "do": kwDo, "drop": kwDrop, "end": kwEnd, "event": kwEvent, "except": kwExcept,
	"execute": kwExecute, "exists": kwExists, "explain": kwExplain, "extension": kwExtension, "fetch": kwFetch,
	"for": kwFor, "from": kwFrom, "function": kwFunction, "grant": kwGrant, "group": kwGroup, "having": kwHaving,
	"insert": kwInsert, "intersect": kwIntersect, "into": kwInto, "isnull": kwIsnull, "isolation": kwIsolation,
	"join": kwJoin, "language": kwLanguage, "lateral": kwLateral, "level": kwLevel, "limit": kwLimit, "local": kwLocal,
	"materialized": kwMaterialized, "merge": kwMerge, "no": kwNo, "notnull": kwNotnull, "null": kwNull,
	"offset": kwOffset, "on": kwOn, "only": kwOnly, "operator": kwOperator, "or": kwOr, "order": kwOrder,
	"perform": kwPerform, "policy": kwPolicy, "prepare": kwPrepare, "prepared": kwPrepared, "procedure": kwProcedure,
	"recursive": kwRecursive, "references": kwReferences, "release": kwRelease, "replace": kwReplace, "reset": kwReset,
	"returning": kwReturning, "revoke": kwRevoke, "rollback": kwRollback, "routine": kwRoutine, "rows": kwRows,
	"rule": kwRule, "savepoint": kwSavepoint, "security": kwSecurity, "select": kwSelect, "session": kwSession,
	"set": kwSet, "start": kwStart, "table": kwTable, "to": kwTo, "transaction": kwTransaction,
	"transform": kwTransform, "trigger": kwTrigger, "union": kwUnion, "update": kwUpdate, "values": kwValues,
	"verbose": kwVerbose, "view": kwView, "where": kwWhere, "window": kwWindow, "with": kwWith, "work": kwWork,
}

// keyword tells which one a token is; a quoted word is none.
func (l *lexer) keyword(t token) keyword {
	var folded [16]byte
	n := t.end - t.start
	if t.kind != tIdent || n > len(folded) {
		return 0
	}
	for i := range n {
		folded[i] = lowerByte(l.src[t.start+i])
	}
	return keywords[string(folded[:n])]
}

package softroce

import (
	"testing"

	"ipoibcm/verbs/verbstest"
)

func TestVerbs(t *testing.T) {
	verbstest.Run(t, func(t *testing.T) verbstest.Pair {
		a, b := pair(t, families[0], nil)
		return verbstest.Pair{A: a, B: b}
	})
}

func TestVerbsOnVeth(t *testing.T) {
	verbstest.Run(t, func(t *testing.T) verbstest.Pair {
		a, b := vethPair(t, 1500, false, nil)
		return verbstest.Pair{A: a, B: b}
	})
}

func TestVerbsWithoutOffload(t *testing.T) {
	verbstest.Run(t, func(t *testing.T) verbstest.Pair {
		a, b := pair(t, families[0], func(o *Options) { o.NoGSO, o.NoGRO = true, true })
		return verbstest.Pair{A: a, B: b}
	})
}

// Command mutants shows that the tests of the tree can fail. The lists in the
// directory list hold small changes to the source, each of which breaks a rule
// of an RFC, of InfiniBand or of ours, and say which tests must notice. A change that
// no named test notices is a mutant that survives, and the command fails.
//
//	go run ./internal/mutants                       # all of them
//	go run ./internal/mutants -fraction 10 -seed 7  # a tenth; without -seed a new one each time, which is printed
//	go run ./internal/mutants -only 'cm/|P_Key'     # those whose name, file or tests match
//	go run ./internal/mutants -resume               # take earlier verdicts on the same tree
//
// The command writes only one file in the tree, .cache/mutants.jsonl, which gets each
// verdict as soon as it is known. The go command reads the changed files from a temporary
// directory. A change inside a function body is made in a copy of that function, which
// runs only if an environment variable holds the mutant's number. So all such changes cost
// one build of each package of tests. A change outside of functions is built alone. The
// tests of each mutant run in a process of their own, several at a time.
package main

import (
	"cmp"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"
)

// journal is where verdicts are kept, below the root of the module.
const journal = ".cache/mutants.jsonl"

type options struct {
	only     string
	fraction int
	seed     uint64
	parallel int
	bound    time.Duration
	resume   bool
	who      bool
	verbose  bool
}

func main() {
	var o options
	flag.StringVar(&o.only, "only", "", "only mutants whose name, file or tests match this `pattern`")
	flag.IntVar(&o.fraction, "fraction", 1, "only one of so many, chosen by -seed")
	flag.Uint64Var(&o.seed, "seed", 0, "chooses, with -fraction; zero means a new one")
	flag.IntVar(&o.parallel, "p", runtime.NumCPU(), "so many at a time")
	flag.DurationVar(&o.bound, "bound", 2*time.Minute, "how long the tests of one mutant may take")
	flag.BoolVar(&o.resume, "resume", false, "take the verdicts that "+journal+" has of this very tree")
	flag.BoolVar(&o.who, "who", false, "run all tests of each mutant's package, and say which of them notice")
	flag.BoolVar(&o.verbose, "v", false, "show for each mutant what its tests said")
	flag.Parse()
	ok, err := run(o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

func run(o options) (ok bool, err error) {
	root, err := moduleRoot()
	if err != nil {
		return false, err
	}
	all, err := readLists(filepath.Join(root, lists))
	if err != nil {
		return false, err
	}
	o.verbose = o.verbose || o.who
	chosen, err := choose(all, &o)
	if err != nil {
		return false, err
	}
	tree, err := hashTree(root)
	if err != nil {
		return false, err
	}
	tmp, err := os.MkdirTemp("", "mutants-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(tmp)
	j, err := openJournal(filepath.Join(root, journal), tree, o.resume)
	if err != nil {
		return false, err
	}
	defer j.close()
	started := time.Now()
	c := campaign{options: o, root: root, tmp: tmp, out: os.Stdout, journal: j, total: len(chosen), started: started}
	c.do(chosen)
	ok = summarize(os.Stdout, c.verdicts)
	fmt.Printf("%d of %d mutants, %d at a time on %d processors, %v\n",
		len(chosen), len(all), o.parallel, runtime.NumCPU(), time.Since(started).Round(time.Second))
	return ok, nil
}

func moduleRoot() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	return filepath.Dir(strings.TrimSpace(string(out))), nil
}

// choose applies -only, -fraction and -seed, and prints the seed that it used.
func choose(all []*mutant, o *options) ([]*mutant, error) {
	pattern, err := regexp.Compile(o.only)
	if err != nil {
		return nil, fmt.Errorf("-only: %w", err)
	}
	var chosen []*mutant
	for _, m := range all {
		if slices.ContainsFunc(m.words(), pattern.MatchString) {
			chosen = append(chosen, m)
		}
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("no mutant matches %q", o.only)
	}
	if o.fraction > 1 {
		o.seed = cmp.Or(o.seed, rand.Uint64N(1e6)+1)
		r := rand.New(rand.NewPCG(o.seed, 0))
		r.Shuffle(len(chosen), func(i, k int) { chosen[i], chosen[k] = chosen[k], chosen[i] })
		chosen = chosen[:(len(chosen)+o.fraction-1)/o.fraction]
		fmt.Printf("mutants: -fraction %d -seed %d\n", o.fraction, o.seed)
	}
	return chosen, nil
}

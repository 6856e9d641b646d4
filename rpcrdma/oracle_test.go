package rpcrdma

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The oracle is a codec that others wrote: rpcgen makes it of an XDR description
// of the headers, and libtirpc has the heads of RPC messages. Its messages are
// in testdata/oracle/vectors.txt; -oracle.update makes them anew.
var updateOracle = flag.Bool("oracle.update", false, "write testdata/oracle/vectors.txt")

const oracleVectors = "testdata/oracle/vectors.txt"

// TestOracleVectors: what the oracle has written we read as it was meant, and
// write the same. V2-5.2-15, V2-5.2-14, V2-5.2-11, V2-5.2-7
func TestOracleVectors(t *testing.T) {
	b, err := os.ReadFile(oracleVectors)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for _, l := range strings.Split(strings.TrimSpace(string(b)), "\n") {
		kind, in, want, ok := oracleLine(l)
		if !ok {
			t.Fatalf("%q", l)
		}
		got, rest, err := oracleText(kind, in)
		switch {
		case err != nil:
			t.Errorf("%v", err)
		case got != want:
			t.Errorf("got is %v, want %v", got, want)
		case rest != len(in):
			t.Errorf("rest is %v, want %v", rest, len(in))
		}
		seen[kind]++
		var out []byte
		switch kind {
		case "h":
			h, _, _ := ParseHeader(in)
			seen[fmt.Sprintf("version %d %v", h.Vers, h.Proc)]++
			if h.Proc == ProcMSGP || h.Proc == ProcDONE {
				continue // we never send these
			}
			out, err = h.AppendBinary(nil)
		case "c":
			c, _, _ := ParseRPCCall(in)
			out = c.Append(nil)
		case "r":
			p, _, _ := ParseRPCReply(in)
			out = p.Append(nil)
		}
		if err != nil || !bytes.Equal(out, in) {
			t.Errorf("%s:\n got %x (%v)\nwant %x", want, out, err, in)
		}
	}
	for _, k := range []string{"h", "c", "r", "version 1 MSG", "version 1 NOMSG", "version 1 MSGP",
		"version 1 DONE", "version 1 ERROR",
		"version 2 MSG", "version 2 NOMSG", "version 2 ERROR", "version 2 OPTIONAL"} {
		if seen[k] < 3 {
			t.Errorf("%s: %d vectors", k, seen[k])
		}
	}
}

// TestOracle compiles the oracle, has it write its vectors again, and gives it
// messages of ours, good and damaged.
func TestOracle(t *testing.T) {
	program, err := buildOracle(t.TempDir())
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	out, err := exec.Command(program, "encode", "400").Output()
	if err != nil {
		t.Fatal(err)
	}
	if *updateOracle {
		if err := os.WriteFile(oracleVectors, out, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if b, err := os.ReadFile(oracleVectors); err != nil || !bytes.Equal(b, out) {
		t.Errorf("%s is not what the oracle writes (%v)", oracleVectors, err)
	}

	asked := oracleQuestions(string(out))
	var ask strings.Builder
	for _, q := range asked {
		fmt.Fprintf(&ask, "%s %x\n", q.kind, q.in)
	}
	c := exec.Command(program, "decode")
	c.Stdin = strings.NewReader(ask.String())
	if out, err = c.Output(); err != nil {
		t.Fatal(err)
	}
	answers := strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
	if len(answers) != len(asked) {
		t.Fatalf("%d answers to %d questions", len(answers), len(asked))
	}
	good, bad, strict := 0, 0, 0
	for i, q := range asked {
		text, n, err := oracleText(q.kind, q.in)
		want := fmt.Sprintf("%s after %d", text, n)
		switch reason := reasonOf(err); {
		case err == nil && answers[i] == want:
			good++
		case err != nil && answers[i] == "bad":
			bad++
		case answers[i] != "bad" && (reason == ReasonBound || reason == ReasonPosition || reason == ReasonEnum ||
			reason == ReasonShort || reason == ReasonRPC):
			strict++ // C takes any number for an enum or a bool, knows no bounds of ours, nor the 28 octets
		default:
			t.Errorf("%s %x:\n  ours %s (%v)\noracle %s", q.kind, q.in, want, err, answers[i])
		}
	}
	t.Logf("%d read alike, %d refused by both, %d refused by us only", good, bad, strict)
	switch {
	case good < len(asked)/4:
		t.Errorf("good is %v, want at least %v", good, len(asked)/4)
	case bad < len(asked)/20:
		t.Errorf("bad is %v, want at least %v", bad, len(asked)/20)
	case strict > len(asked)/2:
		t.Errorf("strict is %v, want at most %v", strict, len(asked)/2)
	}
}

// A question is a message that both read.
type question struct {
	kind string
	in   []byte
}

// oracleQuestions returns messages that are a little wrong, made of those in out.
func oracleQuestions(out string) (asked []question) {
	r := rand.New(rand.NewPCG(5, 6))
	for _, l := range strings.Split(strings.TrimSpace(out), "\n") {
		kind, in, _, _ := oracleLine(l)
		for range 20 {
			b := bytes.Clone(in)
			for range r.IntN(3) { // words that mean something else
				i := r.IntN(len(b)/4) * 4
				if i != 4 { // the version chooses the oracle
					copy(b[i:], words([]uint32{0, 1, 2, 3, 4, 5, 6, 64, 0xffffffff, r.Uint32()}[r.IntN(10)]))
				}
			}
			if r.IntN(4) == 0 {
				b = b[:r.IntN(len(b)+1)]
			}
			asked = append(asked, question{kind, b})
		}
	}
	return asked
}

func buildOracle(dir string) (program string, err error) {
	for _, p := range []string{"rpcgen", "gcc"} {
		if _, err := exec.LookPath(p); err != nil {
			return "", fmt.Errorf("%s is not installed: the codecs are compared with its vectors of the tree only", p)
		}
	}
	if _, err := os.Stat("/usr/include/tirpc/rpc/rpc.h"); err != nil {
		return "", errors.New("libtirpc-dev is not installed: the codecs are compared with the vectors of the tree only")
	}
	for _, name := range []string{"headers.x", "oracle.c"} {
		b, err := os.ReadFile(filepath.Join("testdata/oracle", name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), b, 0o644)
		}
		if err != nil {
			return "", err
		}
	}
	for _, args := range [][]string{
		{"rpcgen", "-C", "-h", "-o", "headers.h", "headers.x"},
		{"rpcgen", "-C", "-c", "-o", "headers_xdr.c", "headers.x"},
		{"gcc", "-w", "-I.", "-I/usr/include/tirpc", "-o", "oracle", "oracle.c", "headers_xdr.c", "-ltirpc"},
	} {
		c := exec.Command(args[0], args[1:]...)
		c.Dir = dir
		if out, err := c.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%s: %v\n%s", args[0], err, out)
		}
	}
	return filepath.Join(dir, "oracle"), nil
}

func oracleLine(l string) (kind string, in []byte, text string, ok bool) {
	f := strings.SplitN(l, " ", 3)
	if len(f) != 3 {
		return "", nil, "", false
	}
	in, err := hex.DecodeString(f[1])
	return f[0], in, f[2], err == nil
}

// oracleText reads a message and prints it as the oracle does. n is the length
// of its header.
func oracleText(kind string, in []byte) (text string, n int, err error) {
	auth := func(a Auth) string { return fmt.Sprintf(" auth %d %x", a.Flavor, a.Body) }
	switch kind {
	case "c":
		c, args, err := ParseRPCCall(in)
		return fmt.Sprintf("%v prog %d vers %d proc %d%s%s", c.XID, c.Prog, c.Vers, c.Proc, auth(c.Cred),
			auth(c.Verf)), len(in) - len(args), err
	case "r":
		p, results, err := ParseRPCReply(in)
		switch p.Status {
		case RPCMismatch:
			text = fmt.Sprintf("%v denied 0 %d %d", p.XID, p.Low, p.High)
		case RPCAuthError:
			text = fmt.Sprintf("%v denied 1 %d", p.XID, p.AuthStat)
		case RPCProgMismatch:
			text = fmt.Sprintf("%v accepted 2 %d %d%s", p.XID, p.Low, p.High, auth(p.Verf))
		default:
			text = fmt.Sprintf("%v accepted %d%s", p.XID, p.Status, auth(p.Verf))
		}
		return text, len(in) - len(results), err
	}
	h, payload, err := ParseHeader(in)
	n = len(in) - len(payload)
	text = fmt.Sprintf("%v v%d %d proc %d", h.XID, h.Vers, h.Credit, h.Proc)
	switch {
	case h.Proc == ProcERROR:
		n = 20
		text += fmt.Sprintf(" error %d", h.Error.Code)
		switch h.Error.Code {
		case ErrVers:
			n += 8
			text += fmt.Sprintf(" %d %d", h.Error.Low, h.Error.High)
		case ErrCantReply:
			n += 12
			processed := 0
			if h.Error.Processed {
				processed = 1
			}
			text += fmt.Sprintf(" %d %d %d", processed, h.Error.SegmentIndex, h.Error.LengthNeeded)
		}
	case h.Proc == ProcOPTIONAL:
		text += fmt.Sprintf(" dir %d type %08x info %x", h.Direction, h.OptType, h.OptInfo)
	case h.Proc.hasLists():
		if h.Proc == ProcMSGP {
			text += fmt.Sprintf(" align %d %d", h.Align, h.Thresh)
		}
		if h.Vers == Version2 {
			text += fmt.Sprintf(" dir %d inv %08x", h.Direction, h.InvHandle)
		}
		text += " reads{"
		for _, s := range h.Reads {
			text += fmt.Sprint(s.Position) + oracleSegment(s.Segment)
		}
		text += "} writes{"
		for _, c := range h.Writes {
			text += oracleChunk(c)
		}
		text += "} reply" + oracleChunk(h.Reply)
	}
	return text, n, err
}

func oracleChunk(c Chunk) string {
	if c == nil {
		return "-"
	}
	s := "["
	for _, g := range c {
		s += oracleSegment(g)
	}
	return s + "]"
}

func oracleSegment(s Segment) string {
	return fmt.Sprintf("(%08x %d %x)", s.Handle, s.Length, s.Offset)
}

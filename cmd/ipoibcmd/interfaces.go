package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"ipoibcm/ib"
	"ipoibcm/logqueue"
)

// A process may have several interfaces, on ports and in partitions of InfiniBand devices, because the
// kernel gives QP 1 of a port to one process only. The file has them in a list under "interfaces"; settings
// beside that list hold for all.

// interfacesKey is the key of that list.
const interfacesKey = "interfaces"

// maxInterfaces bounds the list.
const maxInterfaces = 64

// splitInterfaces takes the list out of top, the keys and values of a file. It returns what is left, and the
// items; none if there is no list.
func splitInterfaces(top *yaml.Node) (common *yaml.Node, each []*yaml.Node, err error) {
	if top.Kind != yaml.MappingNode {
		return top, nil, nil // decode says what is wrong
	}
	for i := 0; i+1 < len(top.Content); i += 2 {
		list := target(top.Content[i+1])
		if top.Content[i].Value != interfacesKey {
			continue
		}
		switch {
		case list.Kind != yaml.SequenceNode || len(list.Content) == 0:
			return nil, nil, fmt.Errorf("line %d: interfaces: want a list of settings, each with a name", list.Line)
		case len(list.Content) > maxInterfaces:
			return nil, nil, fmt.Errorf("line %d: interfaces: %d are given, at most %d can be",
				list.Line, len(list.Content), maxInterfaces)
		}
		for n, item := range list.Content {
			if target(item).Kind != yaml.MappingNode {
				return nil, nil, fmt.Errorf("line %d: interfaces[%d]: want keys and values, such as name: ibcm0", item.Line, n)
			}
		}
		rest := *top
		rest.Content = slices.Delete(slices.Clone(top.Content), i, i+2)
		return &rest, list.Content, nil
	}
	return top, nil, nil
}

// configureAll is configure for a file that may have several interfaces.
func configureAll(cmd *cobra.Command, flags *Config, file string) ([]settings, error) {
	var common *yaml.Node
	var each []*yaml.Node
	if file != "" {
		top, err := topOf(file)
		if err != nil {
			return nil, err
		}
		if common, each, err = splitInterfaces(top); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	if each == nil {
		s, err := configure(cmd, flags, file)
		return []settings{s}, err
	}
	var given []string
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if !slices.Contains([]string{"config", "exit-on-eof", "json"}, f.Name) {
			given = append(given, "--"+f.Name)
		}
	})
	if len(given) > 0 {
		return nil, fmt.Errorf("%s has several interfaces: %s would be for all of them; write it there",
			file, strings.Join(given, ", "))
	}
	all, err := decodeInterfaces(common, each)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return all, nil
}

// decodeInterfaces returns the checked configuration of each interface.
func decodeInterfaces(common *yaml.Node, each []*yaml.Node) (all []settings, err error) {
	configs, lines, err := decodeEach(common, each)
	if err != nil {
		return nil, err
	}
	for i := range configs {
		s, err := configs[i].settings()
		if err == nil {
			err = s.checkBeside(all)
		}
		if err != nil {
			return nil, fmt.Errorf("%sinterfaces[%d]: %w", atLine(lines[i], err), i, err)
		}
		all = append(all, s)
	}
	return all, nil
}

// decodeEach returns the configuration of each interface with the lines of its values, which it does not
// check.
func decodeEach(common *yaml.Node, each []*yaml.Node) (all []Config, lines []map[string]int, err error) {
	for _, own := range each {
		c, at := defaults(), map[string]int{}
		if err := c.decode(common, at); err != nil {
			return nil, nil, err
		}
		if err := c.decode(own, at); err != nil {
			return nil, nil, err
		}
		all, lines = append(all, c), append(lines, at)
	}
	return all, lines, nil
}

// configsOf returns the configurations in a file: one, or one for each of its interfaces. It does not check
// their values.
func configsOf(file string) ([]Config, error) {
	top, err := topOf(file)
	if err != nil {
		return nil, err
	}
	common, each, err := splitInterfaces(top)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if each == nil {
		each = []*yaml.Node{{}} // nothing of its own
	}
	all, _, err := decodeEach(common, each)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return all, nil
}

// checkBeside returns an error if an interface has a setting in common with others of the process that must
// differ, or a provider that allows only one.
func (s *settings) checkBeside(others []settings) error {
	if s.Provider != ibVerbs {
		return bad("provider", "provider %s: a process has several interfaces of provider ibverbs only; start one for each",
			s.Provider)
	}
	for i, other := range others {
		if err := cmp.Or(
			refuse(s.Name == other.Name, "name", "name %q is that of interfaces[%d]", s.Name, i),
			refuse(s.controlPath() == other.controlPath(), "control", "control %q is that of interfaces[%d]",
				s.controlPath(), i),
			refuse(s.Metrics != "" && s.Metrics == other.Metrics, "metrics", "metrics %q is that of interfaces[%d]",
				s.Metrics, i),
		); err != nil {
			return err
		}
	}
	return nil
}

// runAll serves several interfaces. When one ends, all do.
func runAll(ctx context.Context, all []settings, r reloading, readAll func() ([]settings, error)) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	r.level.Set(all[0].level)
	queue := logqueue.New(os.Stderr, logqueue.Options{Level: r.level, JSON: all[0].LogFormat == "json"})
	defer queue.Close(logPatience)
	notify, watchdog := notifier(queue.Logger())
	t := newTogether(notify, len(all))
	t.all = all
	t.watchdog = watchdog
	var wg sync.WaitGroup
	errs := make([]error, len(all))
	var owners []string
	for _, c := range all {
		owners = append(owners, ownerOf(c.Name))
	}
	kept := heirs(activation.Files(true), owners, openStore, queue.Logger())
	for i, c := range all {
		own := r
		own.together, own.member = t, i
		own.owner, own.kept = owners[i], kept[owners[i]]
		own.hangup = t.hangups[i]
		own.read = func() (settings, error) { return configOf(c.Name, all, readAll) }
		wg.Go(func() {
			if errs[i] = serve(ctx, c, own, queue); errs[i] != nil {
				errs[i] = fmt.Errorf("%s: %w", c.Name, errs[i])
			}
			stop()
		})
	}
	wg.Go(func() { t.forward(ctx, r.hangup) })
	wg.Wait()
	return errors.Join(errs...)
}

// A listError says that the file has other interfaces than the process.
type listError struct{ from, to []string }

func (e *listError) Error() string { return "the interfaces are others: that takes a restart" }

// configOf reads the file again and returns the configuration of interface name of a process that was started
// with all of those in before.
func configOf(name string, before []settings, readAll func() ([]settings, error)) (settings, error) {
	all, err := readAll()
	if err != nil {
		return settings{}, err
	}
	from, to := namesOf(before), namesOf(all)
	if !slices.Equal(slices.Sorted(slices.Values(from)), slices.Sorted(slices.Values(to))) {
		return settings{}, &listError{from, to}
	}
	return all[slices.Index(to, name)], nil
}

func namesOf(all []settings) (names []string) {
	for _, c := range all {
		names = append(names, c.Name)
	}
	return names
}

// A together makes several interfaces one service in the eyes of its manager.
type together struct {
	all      []settings
	hangups  []chan os.Signal
	watchdog time.Duration

	mu     sync.Mutex
	notify func(string) // nil: there is no manager
	up     bool         // all were ready
	ready  map[int]bool
	alive  map[int]bool
}

func newTogether(notify func(string), n int) *together {
	t := &together{notify: notify, ready: map[int]bool{}, alive: map[int]bool{}}
	for range n {
		t.hangups = append(t.hangups, make(chan os.Signal, 1))
	}
	return t
}

// links returns how many interfaces of the process, c included, are on c's port and in its partition.
func (t *together) links(c settings) (n int) {
	if t == nil {
		return 1
	}
	for _, o := range t.all {
		if o.Device == c.Device && o.Port == c.Port && (o.PKey^c.PKey)&^uint16(ib.PKeyFull) == 0 {
			n++
		}
	}
	return n
}

// forward gives each SIGHUP to all interfaces.
func (t *together) forward(ctx context.Context, in <-chan os.Signal) {
	for {
		select {
		case <-ctx.Done():
			return
		case s := <-in:
			for _, c := range t.hangups {
				select {
				case c <- s:
				default: // the interface has one to deal with
				}
			}
		}
	}
}

// notifier returns the function by which interface i notifies the service manager; nil if there is no
// manager. The function sends READY=1 when all interfaces are ready, and later for each reload of one. It
// sends WATCHDOG=1 when each interface has done so since the last time. It leaves out STATUS lines.
func (t *together) notifier(i int) func(string) {
	if t.notify == nil {
		return nil
	}
	return func(text string) {
		t.mu.Lock()
		defer t.mu.Unlock()
		var out []string
		for line := range strings.SplitSeq(text, "\n") {
			switch {
			case line == "READY=1":
				t.ready[i] = true
			case line == "WATCHDOG=1":
				t.alive[i] = true
			case !strings.HasPrefix(line, "STATUS="):
				out = append(out, line)
			}
		}
		switch isReady := t.ready[i]; {
		case !t.up && len(t.ready) == len(t.hangups):
			t.up, out = true, append(out, "READY=1")
		case t.up && isReady: // after a reload
			out = append(out, "READY=1")
		}
		if t.up {
			clear(t.ready)
		}
		if len(t.alive) == len(t.hangups) {
			out, t.alive = append(out, "WATCHDOG=1"), map[int]bool{}
		}
		if len(out) > 0 {
			t.notify(strings.Join(out, "\n"))
		}
	}
}

// logger returns the logger of an interface. With several in the process, its lines name the interface.
func (r *reloading) logger(log *slog.Logger, name string) *slog.Logger {
	if r.together == nil {
		return log
	}
	return log.With("interface", name)
}

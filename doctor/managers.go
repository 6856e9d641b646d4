package doctor

import (
	"cmp"
	"path"
	"slices"
	"strings"

	"ipoibcm/control"
)

// Processes that configure network interfaces, as the kernel names them (it
// keeps 15 octets).
const (
	networkManager = "NetworkManager"
	networkd       = "systemd-network"
)

// ManagerNames are the processes to look for.
var ManagerNames = []string{networkManager, networkd, "connmand", "dhcpcd", "wickedd"}

// managers says whether another program would configure the interface too.
func (e *exam) managers() control.Check {
	f := e.f
	var busy, remedies []string
	for _, m := range f.Managers {
		switch m {
		case networkManager:
			if !nmLeaves(f.Files, f.Name) {
				busy = append(busy, "NetworkManager")
				remedies = append(remedies, "in /etc/NetworkManager/conf.d/ipoibcm-"+f.Name+".conf: [keyfile] "+
					"unmanaged-devices+=interface-name:"+f.Name)
			}
		case networkd:
			if file := networkdTakes(f.Files, f.Name); file != "" {
				busy = append(busy, "systemd-networkd by "+file)
				remedies = append(remedies, "in /etc/systemd/network/05-ipoibcm-"+f.Name+".network: [Match] Name="+f.Name+
					" [Link] Unmanaged=yes")
			}
		default:
			busy = append(busy, m)
			remedies = append(remedies, "tell "+m+" to leave "+f.Name+" alone")
		}
	}
	switch {
	case len(busy) > 0:
		return warn(strings.Join(remedies, "; "), "%s may change addresses and routes of %s",
			strings.Join(busy, ", "), f.Name)
	case len(f.Managers) > 0:
		return okay("%s leave %s alone", strings.Join(f.Managers, ", "), f.Name)
	}
	return okay("none runs")
}

// nmLeaves reports whether NetworkManager is told to leave an interface alone. Of its files, each in the place that
// [nmOrder] gives it, "=" replaces what earlier ones say, "+=" adds to it, and "-=" takes away from it
// (NetworkManager.conf(5)).
func nmLeaves(files []File, name string) bool {
	var devices []string
	for _, file := range nmOrder(files) {
		for _, line := range assignments(file.Text) {
			key := strings.TrimRight(line.key, "+- ")
			if key != "unmanaged-devices" {
				continue
			}
			said := strings.FieldsFunc(line.value, func(r rune) bool { return r == ';' || r == ',' || r == ' ' })
			switch line.key[len(line.key)-1] {
			case '+':
				devices = append(devices, said...)
			case '-':
				devices = slices.DeleteFunc(devices, func(d string) bool { return slices.Contains(said, d) })
			default:
				devices = said
			}
		}
	}
	leaves := false
	for _, d := range devices {
		d, except := strings.CutPrefix(d, "except:")
		pattern, ok := strings.CutPrefix(d, "interface-name:")
		switch fits := d == "*" || ok && match(pattern, name); {
		case fits && except:
			return false
		case fits:
			leaves = true
		}
	}
	return leaves
}

// nmOrder returns the files that NetworkManager reads, in its order: those in /usr/lib, those in /run,
// NetworkManager.conf, and those in /etc. A file hides those of its name in folders that come before its own.
func nmOrder(files []File) (out []File) {
	folders := []string{"/usr/lib/NetworkManager/conf.d", "/run/NetworkManager/conf.d", "/etc/NetworkManager", "/etc/NetworkManager/conf.d"}
	place := func(f File) int { return slices.Index(folders, path.Dir(f.Path)) }
	for _, f := range files {
		hidden := slices.ContainsFunc(files, func(g File) bool { return path.Base(g.Path) == path.Base(f.Path) && place(g) > place(f) })
		if place(f) >= 0 && !hidden {
			out = append(out, f)
		}
	}
	slices.SortStableFunc(out, func(a, b File) int {
		return cmp.Or(place(a)-place(b), strings.Compare(path.Base(a.Path), path.Base(b.Path)))
	})
	return out
}

// networkdTakes returns the file by which systemd-networkd configures an interface, "" if networkd leaves
// the interface alone. The first file that matches counts, in the order of names without their directory.
func networkdTakes(files []File, name string) string {
	own := slices.DeleteFunc(slices.Clone(files), func(f File) bool { return !strings.HasSuffix(f.Path, ".network") })
	slices.SortStableFunc(own, func(a, b File) int { return strings.Compare(path.Base(a.Path), path.Base(b.Path)) })
	for _, f := range own {
		matches, unmanaged, others := false, false, false
		for _, a := range assignments(f.Text) {
			switch {
			case a.section == "Match" && a.key == "Name":
				matches = matches || matchAny(strings.Fields(a.value), name)
			case a.section == "Match" && a.key == "Type":
				others = others || !slices.Contains(strings.Fields(a.value), "none") // what a TUN is to networkd
			case a.section == "Match":
				others = true // by MAC, driver and so on: no TUN has these
			case a.section == "Link" && a.key == "Unmanaged":
				unmanaged = isYes(a.value)
			}
		}
		switch {
		case !matches || others:
		case unmanaged:
			return ""
		default:
			return f.Path
		}
	}
	return ""
}

func isYes(s string) bool {
	return slices.Contains([]string{"yes", "true", "on", "1"}, strings.ToLower(s))
}

// matchAny reports whether name fits one of the patterns. A pattern behind an exclamation mark excludes the
// names that fit it, and includes all others.
func matchAny(patterns []string, name string) bool {
	fits := false
	for _, p := range patterns {
		if not, ok := strings.CutPrefix(p, "!"); ok {
			if match(not, name) {
				return false
			}
			fits = true
			continue
		}
		fits = fits || match(p, name)
	}
	return fits
}

func match(pattern, name string) bool {
	ok, err := path.Match(pattern, name)
	return err == nil && ok
}

// An assignment is one line of an ini file.
type assignment struct{ section, key, value string }

func assignments(text string) (out []assignment) {
	section := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch {
		case line == "" || line[0] == '#' || line[0] == ';':
		case line[0] == '[':
			section = strings.Trim(line, "[]")
		default:
			if k, v, ok := strings.Cut(line, "="); ok {
				out = append(out, assignment{section, strings.TrimSpace(k), strings.TrimSpace(v)})
			}
		}
	}
	return out
}

package vm

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"ipoibcm/test/interop/guest"
)

// programs are the programs of the host that guests have, with their libraries.
var programs = []string{
	"ip", "rdma", "ibv_devinfo", "ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong", "ibv_srq_pingpong",
	"rping", "ucmatose", "cmtime", "udaddy",
}

// tools are the programs that are needed for making an image and running it, each
// with its Debian package.
var tools = [][2]string{
	{"qemu-system-x86_64", "qemu-system-x86"}, {"apt-get", "apt"}, {"dpkg-deb", "dpkg"}, {"depmod", "kmod"},
	{"xz", "xz-utils"}, {"zstd", "zstd"},
	{"busybox", "busybox-static"}, {"gcc", "gcc"}, {"ldd", "libc-bin"}, {"ip", "iproute2"},
	{"ibv_rc_pingpong", "ibverbs-utils"}, {"rping", "rdmacm-utils"},
}

// A MissingError says what the machine lacks for running guests. Tests skip then.
type MissingError struct{ Package, Why string }

func (e *MissingError) Error() string { return fmt.Sprintf("%s (package %s)", e.Why, e.Package) }

// An UnreachableError says that another release of Debian, which has the requested
// kernel, cannot be reached. Tests skip then, because old releases leave the mirrors.
type UnreachableError struct {
	Release, Series string
	Err             error
}

func (e *UnreachableError) Error() string {
	return fmt.Sprintf("Debian's %s, which has Linux %s, cannot be asked: %v", e.Release, e.Series, e.Err)
}

func (e *UnreachableError) Unwrap() error { return e.Err }

// An Image is what guests boot.
type Image struct {
	Kernel string // ELF file
	Initrd string // cpio archive

	series string // of the kernel, as given to Open
}

// version changes when the code of this package makes another image from the same sources.
const version = "1"

// keep is how many images stay in the cache.
const keep = 4

// Cache returns the folder in which images are kept: $IPOIBCM_CACHE, or one in
// the user's cache.
func Cache() (string, error) {
	if d := os.Getenv("IPOIBCM_CACHE"); d != "" {
		return filepath.Abs(d)
	}
	d, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no folder for a cache, set IPOIBCM_CACHE: %w", err)
	}
	return filepath.Join(d, "ipoibcm"), nil
}

// lockCache makes the folder of Cache if need be, and locks it until the caller closes lock.
func lockCache() (cache string, lock *os.File, err error) {
	if cache, err = Cache(); err != nil {
		return "", nil, err
	}
	if err = os.MkdirAll(cache, 0o755); err != nil {
		return "", nil, err
	}
	if lock, err = os.OpenFile(filepath.Join(cache, "lock"), os.O_CREATE|os.O_RDWR, 0o644); err != nil {
		return "", nil, err
	}
	if err = unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		lock.Close()
		return "", nil, fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	return cache, lock, nil
}

// Open returns the image with the newest kernel of a series that Debian has, such as
// "6.12"; "" means the series of the host's release. Open makes the image anew if its
// kernel, its programs or the sources in this tree have changed. Processes that call Open
// at the same time wait for one another.
func Open(ctx context.Context, series string) (*Image, error) {
	if err := checkTools(); err != nil {
		return nil, err
	}
	cache, lock, err := lockCache()
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	tmp, err := os.MkdirTemp(cache, "tmp-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	daemon := filepath.Join(tmp, "guestd")
	c := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", daemon,
		"ipoibcm/test/interop/guest/guestd")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build guestd: %w: %s", err, out)
	}
	pkg, from, err := findKernel(ctx, series, cache)
	if err != nil {
		return nil, err
	}
	key, err := imageKey(pkg, daemon)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(cache, "image-"+key)
	img := &Image{Kernel: filepath.Join(dir, "vmlinux"), Initrd: filepath.Join(dir, "initrd"), series: series}
	if _, err := os.Stat(img.Initrd); err == nil {
		return img, nil
	}
	if err := build(ctx, tmp, pkg, from, daemon, cache); err != nil {
		return nil, err
	}
	os.RemoveAll(dir)
	if err := os.Rename(filepath.Join(tmp, "image"), dir); err != nil {
		return nil, err
	}
	prune(cache, dir)
	return img, nil
}

// require returns a [MissingError] for the first of the programs that is not installed.
func require(programs [][2]string) error {
	for _, t := range programs {
		if _, err := exec.LookPath(t[0]); err != nil {
			return &MissingError{t[1], t[0] + " is not installed"}
		}
	}
	return nil
}

func checkTools() error {
	if err := require(tools); err != nil {
		return err
	}
	if len(providerFiles()) != 2 {
		return &MissingError{"ibverbs-providers", "the rxe driver of libibverbs is not installed"}
	}
	if _, err := os.Stat("/usr/include/infiniband/verbs.h"); err != nil {
		return &MissingError{"libibverbs-dev", "the header files of libibverbs are not installed"}
	}
	return nil
}

// imageKey returns a digest of what goes into an image, but for the libraries of its programs.
func imageKey(pkg, daemon string) (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, version, pkg, modules, programs)
	h.Write(guest.Init)
	h.Write(guest.Peer)
	files := append([]string{daemon, busybox()}, providerFiles()...)
	for _, p := range programs {
		if path, err := exec.LookPath(p); err == nil {
			files = append(files, path)
		}
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return "", err
		}
		fmt.Fprintln(h, f, len(b))
		h.Write(b)
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8]), nil
}

// build makes the image in tmp/image.
func build(ctx context.Context, tmp, pkg string, from apt, daemon, cache string) error {
	img, root := filepath.Join(tmp, "image"), filepath.Join(tmp, "root")
	k, err := cachedKernel(ctx, pkg, from, cache, tmp)
	if err != nil {
		return err
	}
	for _, d := range []string{"bin", "sbin", "usr/bin", "usr/sbin", "lib64", "proc", "sys", "dev", "tmp", "run",
		"var/run", "etc/libibverbs.d"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	if err := os.Mkdir(img, 0o755); err != nil {
		return err
	}
	if err := k.vmlinux(ctx, filepath.Join(img, "vmlinux")); err != nil {
		return err
	}
	if err := k.copyModules(ctx, root); err != nil {
		return err
	}
	r := &tree{ctx: ctx, root: root}
	r.file(busybox(), "bin/busybox")
	r.link("busybox", "bin/sh")
	r.link("/bin/busybox", "sbin/modprobe") // rxe makes the kernel load a CRC module
	r.file(daemon, "usr/bin/guestd")
	for _, p := range programs {
		if path, err := exec.LookPath(p); err == nil {
			r.program(path)
		}
	}
	for _, f := range providerFiles() {
		r.file(f, f)
		if filepath.Ext(f) == ".so" {
			r.libraries(f)
		}
	}
	// pthread_exit loads libgcc_s when it needs it, which ldd does not show.
	if libs, _ := filepath.Glob("/lib/*-linux-gnu/libgcc_s.so.1"); len(libs) > 0 {
		r.file(libs[0], libs[0])
	}
	peer := filepath.Join(tmp, "peer")
	src := peer + ".c"
	r.text(guest.Init, "init", 0o755)
	r.text([]byte("root:x:0:0:root:/:/bin/sh\n"), "etc/passwd", 0o644)
	r.text([]byte("root:x:0:\n"), "etc/group", 0o644)
	r.text([]byte("127.0.0.1 localhost\n"), "etc/hosts", 0o644)
	r.text([]byte("hosts: files\n"), "etc/nsswitch.conf", 0o644)
	if err := os.WriteFile(src, guest.Peer, 0o644); err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, "gcc", "-O1", "-Wall", "-o", peer, src,
		"-libverbs").CombinedOutput(); err != nil {
		return fmt.Errorf("compile peer.c: %w\n%s", err, out)
	}
	r.program(peer)
	return r.pack(filepath.Join(img, "initrd"))
}

// cachedKernel returns the unpacked kernel package pkg from the cache. Images share it.
func cachedKernel(ctx context.Context, pkg string, from apt, cache, tmp string) (*kernel, error) {
	k := &kernel{version: strings.TrimPrefix(pkg, "linux-image-"), dir: filepath.Join(cache, pkg)}
	if _, err := os.Stat(k.dir); err == nil {
		return k, nil
	}
	fresh := filepath.Join(tmp, "kernel")
	if err := from.unpack(ctx, tmp, pkg, fresh); err != nil {
		return nil, err
	}
	if _, err := output(ctx, tmp, "depmod", "-b", fresh, k.version); err != nil {
		return nil, err
	}
	return k, os.Rename(fresh, k.dir)
}

// prune removes the oldest images until keep are left. It never removes newest.
func prune(cache, newest string) {
	dirs, _ := filepath.Glob(filepath.Join(cache, "image-*"))
	excess := len(dirs) - keep
	dirs = slices.DeleteFunc(dirs, func(d string) bool { return d == newest })
	slices.SortStableFunc(dirs, func(a, b string) int { return cmp.Compare(modTime(a), modTime(b)) })
	for _, d := range dirs[:max(0, excess)] {
		os.RemoveAll(d)
	}
}

func modTime(path string) int64 {
	if i, err := os.Stat(path); err == nil {
		return i.ModTime().UnixNano()
	}
	return 0
}

// busybox returns the path of the program busybox, which is static.
func busybox() string {
	path, _ := exec.LookPath("busybox")
	return path
}

// providerFiles are the driver of libibverbs for rxe and its configuration.
func providerFiles() []string {
	so, _ := filepath.Glob("/usr/lib/*-linux-gnu/libibverbs/librxe-rdmav*.so")
	conf, _ := filepath.Glob("/etc/libibverbs.d/rxe.driver")
	return append(so, conf...)
}

// A tree is a root file system in the making. After an error it does nothing more.
type tree struct {
	ctx  context.Context
	root string
	err  error
}

// text makes the file to with the octets b.
func (t *tree) text(b []byte, to string, mode os.FileMode) {
	to = filepath.Join(t.root, to)
	if t.err == nil {
		t.err = os.MkdirAll(filepath.Dir(to), 0o755)
	}
	if t.err == nil {
		t.err = os.WriteFile(to, b, mode)
	}
}

// file copies a file of the host. It follows links.
func (t *tree) file(from, to string) {
	var b []byte
	if t.err == nil {
		b, t.err = os.ReadFile(from)
	}
	t.text(b, to, 0o755)
}

func (t *tree) link(target, name string) {
	if t.err == nil {
		t.err = os.Symlink(target, filepath.Join(t.root, name))
	}
}

// pack makes file an archive of the tree.
func (t *tree) pack(file string) error {
	if t.err != nil {
		return t.err
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	w := bufio.NewWriter(f)
	c := cpio{w: w}
	return errors.Join(c.tree(t.root), c.end(), w.Flush(), f.Close())
}

// program copies a program and its libraries.
func (t *tree) program(path string) {
	t.file(path, filepath.Join("usr/bin", filepath.Base(path)))
	t.libraries(path)
}

var ldLine = regexp.MustCompile(`(/\S+) \(0x`)

// libraries copies what the dynamic linker would load for an object.
func (t *tree) libraries(path string) {
	if t.err != nil {
		return
	}
	out, err := output(t.ctx, "", "ldd", path)
	if err != nil && !static(path) {
		t.err = err
	}
	for _, m := range ldLine.FindAllStringSubmatch(out, -1) {
		if _, err := os.Stat(filepath.Join(t.root, m[1])); err != nil {
			t.file(m[1], m[1])
		}
	}
}

// static reports whether a program needs no dynamic linker. ldd fails for such a program.
func static(path string) bool {
	f, err := elf.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	return f.Section(".interp") == nil
}

package sftp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// handle is one open file or directory. Exactly one of fd (when dir is nil) and dir is in use.
type handle struct {
	fd   int
	dir  *os.File
	path string
	dots bool // "." and ".." are still to be listed
}

func (h *handle) close() error {
	if h.dir != nil {
		return h.dir.Close()
	}
	return unix.Close(h.fd)
}

// action is what answers a request type, nil for an unknown one. It writes its own reply or returns an error.
//
//nolint:gocyclo // a table: one row a request type
func action(kind byte) func(*Server, uint32, *reader) error {
	switch kind {
	case typeOpen:
		return (*Server).open
	case typeClose:
		return (*Server).closeHandle
	case typeRead:
		return (*Server).read
	case typeWrite:
		return (*Server).write
	case typeLstat:
		return (*Server).lstat
	case typeFstat:
		return (*Server).fstat
	case typeSetstat:
		return (*Server).setstat
	case typeFsetstat:
		return (*Server).fsetstat
	case typeOpendir:
		return (*Server).opendir
	case typeReaddir:
		return (*Server).readdir
	case typeRemove:
		return (*Server).remove
	case typeMkdir:
		return (*Server).mkdir
	case typeRmdir:
		return (*Server).rmdir
	case typeRealpath:
		return (*Server).realpath
	case typeStat:
		return (*Server).stat
	case typeRename:
		return (*Server).rename
	case typeReadlink:
		return (*Server).readlink
	case typeSymlink:
		return (*Server).symlink
	case typeExtended:
		return (*Server).extended
	default:
		return nil
	}
}

func (s *Server) open(id uint32, req *reader) error {
	path, flags, a := s.path(req.string()), req.uint32(), req.attrs()
	if req.bad {
		return nil
	}
	mode := uint32(0o666)
	if a.flags&attrMode != 0 {
		mode = a.mode & 0o7777
	}
	if len(s.handles) >= maxHandles {
		return errManyHandles
	}
	fd, err := retry(func() (int, error) { return unix.Open(path, openFlags(flags), mode) })
	if err != nil {
		return err
	}
	return s.addHandle(id, &handle{fd: fd, path: path})
}

func openFlags(flags uint32) int {
	f := unix.O_CLOEXEC
	switch flags & (flagRead | flagWrite) {
	case flagRead | flagWrite:
		f |= unix.O_RDWR
	case flagWrite:
		f |= unix.O_WRONLY
	}
	for _, pair := range [...]struct {
		flag uint32
		os   int
	}{{flagAppend, unix.O_APPEND}, {flagCreate, unix.O_CREAT}, {flagTrunc, unix.O_TRUNC}, {flagExcl, unix.O_EXCL}} {
		if flags&pair.flag != 0 {
			f |= pair.os
		}
	}
	return f
}

func (s *Server) addHandle(id uint32, h *handle) error {
	s.next++
	s.handles[s.next] = h
	s.begin(typeHandle, id)
	s.reply = binary.BigEndian.AppendUint32(s.reply, 4)
	s.reply = binary.BigEndian.AppendUint32(s.reply, s.next)
	return nil
}

func (s *Server) handle(req *reader) (uint32, *handle, error) {
	b := req.bytes()
	if req.bad || len(b) != 4 {
		return 0, nil, errBadHandle
	}
	n := binary.BigEndian.Uint32(b)
	h, ok := s.handles[n]
	if !ok {
		return 0, nil, errBadHandle
	}
	return n, h, nil
}

func (s *Server) file(req *reader) (*handle, error) {
	_, h, err := s.handle(req)
	if err == nil && h.dir != nil {
		return nil, errBadHandle
	}
	return h, err
}

func (s *Server) closeHandle(id uint32, req *reader) error {
	n, h, err := s.handle(req)
	if err != nil {
		return err
	}
	delete(s.handles, n)
	if err := h.close(); err != nil {
		return err
	}
	return s.ok(id)
}

func (s *Server) closeAll() {
	for n, h := range s.handles {
		h.close() // nobody is left to tell
		delete(s.handles, n)
	}
}

func (s *Server) read(id uint32, req *reader) error {
	h, err := s.file(req)
	off, size := req.uint64(), min(int(req.uint32()), maxData)
	if err != nil || req.bad {
		return err
	}
	s.begin(typeData, id)
	at := len(s.reply) + 4
	if cap(s.reply) < at+size {
		s.reply = append(make([]byte, 0, at+size), s.reply...)
	}
	n, err := retry(func() (int, error) { return unix.Pread(h.fd, s.reply[at:at+size], int64(off)) })
	if errors.Is(err, unix.ESPIPE) {
		n, err = retry(func() (int, error) { return unix.Read(h.fd, s.reply[at:at+size]) })
	}
	if err != nil {
		return err
	}
	if n == 0 && size > 0 {
		return io.EOF
	}
	s.reply = binary.BigEndian.AppendUint32(s.reply, uint32(n))[:at+n]
	return nil
}

func (s *Server) write(id uint32, req *reader) error {
	h, err := s.file(req)
	off, data := int64(req.uint64()), req.bytes()
	if err != nil || req.bad {
		return err
	}
	for len(data) > 0 {
		n, err := retry(func() (int, error) { return unix.Pwrite(h.fd, data, off) })
		if errors.Is(err, unix.ESPIPE) {
			n, err = retry(func() (int, error) { return unix.Write(h.fd, data) })
		}
		if err != nil {
			return err
		}
		data, off = data[n:], off+int64(n)
	}
	return s.ok(id)
}

func (s *Server) stat(id uint32, req *reader) error {
	path := s.path(req.string())
	return s.replyStat(id, func(st *unix.Stat_t) error { return unix.Stat(path, st) })
}

func (s *Server) lstat(id uint32, req *reader) error {
	path := s.path(req.string())
	return s.replyStat(id, func(st *unix.Stat_t) error { return unix.Lstat(path, st) })
}

func (s *Server) fstat(id uint32, req *reader) error {
	_, h, err := s.handle(req)
	if err != nil {
		return err
	}
	return s.replyStat(id, func(st *unix.Stat_t) error {
		if h.dir != nil {
			return unix.Fstat(int(h.dir.Fd()), st)
		}
		return unix.Fstat(h.fd, st)
	})
}

func (s *Server) replyStat(id uint32, stat func(*unix.Stat_t) error) error {
	var st unix.Stat_t
	if err := stat(&st); err != nil {
		return err
	}
	s.begin(typeAttrs, id)
	s.reply = appendAttrs(s.reply, &st)
	return nil
}

func (s *Server) setstat(id uint32, req *reader) error {
	path, a := s.path(req.string()), req.attrs()
	if req.bad {
		return nil
	}
	return s.applied(id, setAttrs(path, a, 0))
}

func (s *Server) fsetstat(id uint32, req *reader) error {
	h, err := s.file(req)
	a := req.attrs()
	if err != nil || req.bad {
		return err
	}
	// The size by descriptor: a file that was made read-only may still be cut by who has it open for writing, as scp does.
	var sizeErr error
	if a.flags&attrSize != 0 {
		sizeErr = unix.Ftruncate(h.fd, int64(a.size))
		a.flags &^= attrSize
	}
	err = setAttrs("/proc/self/fd/"+strconv.Itoa(h.fd), a, 0)
	if sizeErr != nil {
		err = sizeErr
	}
	return s.applied(id, err)
}

func (s *Server) applied(id uint32, err error) error {
	if err != nil {
		return err
	}
	return s.ok(id)
}

// setAttrs applies what a has, all of it even when one part fails, and returns the first failure. flags is 0 or
// AT_SYMLINK_NOFOLLOW.
func setAttrs(path string, a attrs, flags int) error {
	var errs []error
	if a.flags&attrSize != 0 {
		if flags != 0 {
			errs = append(errs, errUnsupported)
		} else {
			errs = append(errs, unix.Truncate(path, int64(a.size)))
		}
	}
	if a.flags&attrMode != 0 {
		errs = append(errs, unix.Fchmodat(unix.AT_FDCWD, path, a.mode&0o7777, flags))
	}
	if a.flags&attrTimes != 0 {
		ts := []unix.Timespec{{Sec: int64(a.atime)}, {Sec: int64(a.mtime)}}
		errs = append(errs, unix.UtimesNanoAt(unix.AT_FDCWD, path, ts, flags))
	}
	if a.flags&attrUIDGID != 0 {
		errs = append(errs, unix.Fchownat(unix.AT_FDCWD, path, int(a.uid), int(a.gid), flags))
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *Server) opendir(id uint32, req *reader) error {
	path := s.path(req.string())
	if len(s.handles) >= maxHandles {
		return errManyHandles
	}
	fd, err := retry(func() (int, error) { return unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return err
	}
	return s.addHandle(id, &handle{dir: os.NewFile(uintptr(fd), path), path: path, dots: true})
}

// readdir answers up to 128 names. A name that vanished since it was read is left out; a dangling link is listed as a link.
func (s *Server) readdir(id uint32, req *reader) error {
	_, h, err := s.handle(req)
	if err != nil {
		return err
	}
	if h.dir == nil {
		return errBadHandle
	}
	s.begin(typeName, id)
	countAt := len(s.reply)
	s.reply = append(s.reply, 0, 0, 0, 0)
	count := uint32(0)
	for count == 0 {
		list, err := h.dir.Readdirnames(128)
		if h.dots {
			list, h.dots, err = append([]string{".", ".."}, list...), false, nil
		}
		if err != nil {
			return err
		}
		for _, name := range list {
			if s.appendEntry(int(h.dir.Fd()), name) {
				count++
			}
		}
	}
	binary.BigEndian.PutUint32(s.reply[countAt:], count)
	return nil
}

func (s *Server) appendEntry(dir int, name string) bool {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return false
	}
	s.reply = appendString(s.reply, name)
	s.reply = appendString(s.reply, s.names.longName(name, &st, time.Now()))
	s.reply = appendAttrs(s.reply, &st)
	return true
}

func (s *Server) remove(id uint32, req *reader) error {
	return s.applied(id, unix.Unlink(s.path(req.string())))
}

func (s *Server) mkdir(id uint32, req *reader) error {
	path, a := s.path(req.string()), req.attrs()
	if req.bad {
		return nil
	}
	mode := uint32(0o777)
	if a.flags&attrMode != 0 {
		mode = a.mode & 0o7777
	}
	return s.applied(id, unix.Mkdir(path, mode))
}

func (s *Server) rmdir(id uint32, req *reader) error {
	return s.applied(id, unix.Rmdir(s.path(req.string())))
}

func (s *Server) readlink(id uint32, req *reader) error {
	target, err := os.Readlink(s.path(req.string()))
	if err != nil {
		return err
	}
	return s.replyName(id, target)
}

func (s *Server) realpath(id uint32, req *reader) error {
	real, err := resolve(s.path(req.string()))
	if err != nil {
		return err
	}
	return s.replyName(id, real)
}

// resolve follows links; the last element need not be there, as with OpenSSH.
func resolve(path string) (string, error) {
	path = filepath.Clean(path)
	real, err := filepath.EvalSymlinks(path)
	if errors.Is(err, os.ErrNotExist) {
		parent, err := filepath.EvalSymlinks(filepath.Dir(path))
		if err != nil {
			return "", fmt.Errorf("resolve: %w", err)
		}
		return filepath.Join(parent, filepath.Base(path)), nil
	}
	return real, err
}

func (s *Server) replyName(id uint32, name string) error {
	s.begin(typeName, id)
	s.reply = binary.BigEndian.AppendUint32(s.reply, 1)
	s.reply = appendString(s.reply, name)
	s.reply = appendString(s.reply, name)
	s.reply = binary.BigEndian.AppendUint32(s.reply, 0)
	return nil
}

// symlink takes the target first: OpenSSH's order, which all clients follow, not the draft's.
func (s *Server) symlink(id uint32, req *reader) error {
	target, link := req.string(), s.path(req.string())
	if req.bad {
		return nil
	}
	return s.applied(id, unix.Symlink(target, link))
}

// rename is version 3's: it fails when the new name exists and leaves that file alone.
func (s *Server) rename(id uint32, req *reader) error {
	from, to := s.path(req.string()), s.path(req.string())
	if req.bad {
		return nil
	}
	return s.applied(id, renameNoReplace(from, to))
}

func renameNoReplace(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOSYS) {
		return err
	}
	// A file system without the flag: a hard link is as atomic, but only for files.
	if err := unix.Link(from, to); err == nil {
		return unix.Unlink(from)
	} else if errors.Is(err, unix.EEXIST) {
		return err
	}
	if _, err := os.Lstat(to); err == nil {
		return unix.EEXIST
	}
	return unix.Rename(from, to)
}

func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

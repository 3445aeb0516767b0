package command

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

const maxImport = 8 << 20 // bytes of a CSV file; 2,000 accounts are a fiftieth of it

var importColumns = []string{"name", "login", "uid", "gid", "groups", "role", "project", "gpu_limit"}

func newUserImport(a *app) *cobra.Command {
	o := listFlags{}
	var partial bool
	cmd := &cobra.Command{
		Use:   "import CSV",
		Short: "Make accounts from a CSV file (`-`: stdin), all or none, and print their sign-ins",
		Long: "The first line names the columns: " + strings.Join(importColumns, ", ") + "; only name is needed. groups holds `NAME:GID` pairs\n" +
			"with blanks between them. Nothing is made where a line is wrong, unless --partial says so.",
		Args: exactArgs("CSV"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.early(o); err != nil {
				return err
			}
			users, err := a.readUsers(args[0])
			if err != nil {
				return err
			}
			added, err := a.addUsers(cmd.Context(), users, partial)
			if err != nil {
				return err
			}
			if err := writeList(a, addedList(), added, o); err != nil {
				return err
			}
			if n := len(slices.DeleteFunc(slices.Clone(added), func(v addedView) bool { return v.Error == "" })); n > 0 {
				return failf(exitFailure, "%d of %d accounts were not made", n, len(added))
			}
			return nil
		},
	}
	a.listFlags(cmd, &o)
	cmd.Flags().BoolVar(&partial, "partial", false, "make those that are right, tell what is wrong with the others")
	return cmd
}

func addedList() output.List[addedView] {
	type col = output.Column[addedView]
	return output.List[addedView]{
		Columns: []col{
			{Name: "name", Title: "NAME", Text: func(v addedView) string { return v.Name }},
			{Name: "sign_in", Title: "SIGN IN", Text: func(v addedView) string { return orDash(v.SignIn) }, Value: func(v addedView) string { return v.SignIn }},
			{Name: "error", Title: "ERROR", Text: func(v addedView) string { return v.Error }, Color: func(addedView) string { return output.Red }},
		},
		ID: func(v addedView) string { return v.Name },
	}
}

func (a *app) readUsers(path string) ([]*carrelv1.User, error) {
	in := a.sys.In
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, usagef("%v", err)
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	return parseUsers(io.LimitReader(in, maxImport))
}

// parseUsers reads the file; all its faults are told together, each with its line.
func parseUsers(r io.Reader) ([]*carrelv1.User, error) {
	c := csv.NewReader(r)
	c.TrimLeadingSpace = true
	head, err := c.Read()
	if err != nil {
		return nil, usagef("CSV: %s", csvFault(err))
	}
	head[0] = strings.TrimPrefix(head[0], "\ufeff") // spreadsheets write a byte order mark
	if err := checkHead(head); err != nil {
		return nil, err
	}
	var users []*carrelv1.User
	var faults []string
	seen := map[string]int{}
	for {
		record, err := c.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		line, _ := c.FieldPos(0)
		if err != nil {
			faults = append(faults, csvFault(err))
			if !errors.Is(err, csv.ErrFieldCount) {
				break
			}
			continue
		}
		u, err := recordUser(head, record)
		if err != nil {
			faults = append(faults, fmt.Sprintf("line %d: %v", line, err))
			continue
		}
		if before, twice := seen[u.GetName()]; twice {
			faults = append(faults, fmt.Sprintf("line %d: %s stands in line %d already", line, u.GetName(), before))
		}
		seen[u.GetName()] = line
		users = append(users, u)
	}
	if len(faults) > 0 {
		return nil, usagef("%s", strings.Join(faults, "; "))
	}
	if len(users) == 0 {
		return nil, usagef("CSV: no accounts below the head line")
	}
	return users, nil
}

func csvFault(err error) string {
	if errors.Is(err, io.EOF) {
		return "the file is empty"
	}
	return err.Error()
}

func checkHead(head []string) error {
	for i, h := range head {
		head[i] = strings.ToLower(strings.TrimSpace(h))
		if !slices.Contains(importColumns, head[i]) {
			return usagef("CSV: unknown column %q; known are %s", h, strings.Join(importColumns, ", "))
		}
		if slices.Contains(head[:i], head[i]) {
			return usagef("CSV: column %s stands twice", head[i])
		}
	}
	if !slices.Contains(head, "name") {
		return usagef("CSV: the first line must name the columns; `name` is missing")
	}
	return nil
}

func recordUser(head, record []string) (*carrelv1.User, error) {
	at := map[string]string{}
	for i, h := range head {
		at[h] = strings.TrimSpace(record[i])
	}
	if at["name"] == "" {
		return nil, errors.New("no name")
	}
	f := userFlags{
		login: at["login"], uid: at["uid"], gid: at["gid"], role: at["role"], project: at["project"], gpuLimit: at["gpu_limit"],
		groups: strings.Fields(at["groups"]),
	}
	u, _, err := f.user(at["name"])
	return u, err
}

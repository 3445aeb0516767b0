package sqlite

import (
	"context"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Projects returns all projects by name, with their members' names.
func (db *DB) Projects(ctx context.Context) (projects []fleet.Project, err error) {
	err = db.read(ctx, func(t *tx) error {
		projects, err = all(t, scanWith(func(p *fleet.Project) []any { return []any{&p.Name, &p.Description} }),
			`SELECT name, description FROM project ORDER BY name`)
		if err != nil {
			return err
		}
		index := map[string]int{}
		for i, p := range projects {
			index[p.Name] = i
		}
		return each(t, func(s scanner) error {
			var project, member string
			if err := s.Scan(&project, &member); err != nil {
				return err
			}
			p := &projects[index[project]]
			p.Members = append(p.Members, member)
			return nil
		}, `SELECT project_member.project, user.name FROM project_member JOIN user ON user.id = project_member.user WHERE user.deleted_at IS NULL ORDER BY user.name`)
	})
	return projects, err
}

// CreateProject makes a project with members by name. KindExists, and KindNotFound for an unknown member.
func (db *DB) CreateProject(ctx context.Context, p fleet.Project, now time.Time) error {
	if err := fleet.CheckName("project", p.Name); err != nil {
		return err
	}
	return db.write(ctx, now, func(t *tx) error {
		err := t.exec(`INSERT INTO project (name, description, created_at) VALUES (?, ?, ?)`, p.Name, p.Description, t.now)
		if isUnique(err) {
			return fleet.Errorf(fleet.KindExists, "there is a project %s already", p.Name)
		}
		if err != nil {
			return err
		}
		for _, name := range p.Members {
			u, err := t.userByName(name)
			if err != nil {
				return err
			}
			if err := t.joinProject(p.Name, u.ID); err != nil {
				return err
			}
		}
		return nil
	})
}

func (t *tx) needProject(name string) error {
	var found int
	if err := t.row(`SELECT count(*) FROM project WHERE name = ?`, name).Scan(&found); err != nil {
		return err
	}
	if found == 0 {
		return fleet.Errorf(fleet.KindNotFound, "there is no project %q", clip(name))
	}
	return nil
}

func (t *tx) joinProject(project string, user fleet.UserID) error {
	return t.exec(`INSERT INTO project_member (project, user) VALUES (?, ?) ON CONFLICT DO NOTHING`, project, user)
}

// ChangeProject bills a workspace to another project from now on: its open leases get a change fact, and what was billed stays.
func (db *DB) ChangeProject(ctx context.Context, id fleet.WorkspaceID, project string, now time.Time) (w fleet.Workspace, err error) {
	err = db.write(ctx, now, func(t *tx) error {
		if err := t.needProject(project); err != nil {
			return err
		}
		if w, err = t.workspace(id); err != nil || w.Project == project {
			return err
		}
		if err := t.exec(`UPDATE workspace SET project = ?, version = version + 1 WHERE id = ?`, project, id); err != nil {
			return err
		}
		leases, err := all(t, scanInt[fleet.LeaseID], `SELECT id FROM lease WHERE workspace = ? AND released_at IS NULL ORDER BY id`, id)
		if err != nil {
			return err
		}
		for _, lease := range leases {
			if err := t.exec(`UPDATE lease SET project = ?, changes = changes + 1 WHERE id = ?`, project, lease); err != nil {
				return err
			}
			if err := t.addFact(lease, fleet.FactChange, t.now); err != nil {
				return err
			}
		}
		w, err = t.workspace(id)
		return err
	})
	return w, err
}
